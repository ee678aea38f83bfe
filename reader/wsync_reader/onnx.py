"""Weights in ONNX Runtime: a session with a new version is built beside the one that runs, and takes its place."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnxruntime as ort
from onnx import helper

from wsync_reader.layout import LayoutMismatch, Weights


class OnnxModel:
    """The model in a ``.onnx`` file of at most 2 GB, whose initialisers are replaced, version by version.

    ``names``: ``{weight: initialiser}``; by default all weights, which then have the names of initialisers. ``options``
    are those of ``InferenceSession``. ``version`` is what ``run`` uses; 0 for the file's own values.
    """

    def __init__(self, path: str | os.PathLike[str], names: Mapping[str, str] | None = None, **options: Any) -> None:
        self._model, self._names = onnx.load(os.fspath(path)), names
        self._options = {"providers": ["CPUExecutionProvider"], **options}
        self._session, self.version = self._built(self._model), 0

    def _built(self, model: onnx.ModelProto) -> Any:
        return ort.InferenceSession(model.SerializeToString(), **self._options)

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None) -> Sequence[Any]:
        """Return the outputs, by weights of one version. Any thread may call."""
        return self._session.run(outputs, dict(inputs))

    def install(self, weights: Weights) -> None:
        """Use these weights; calls that run go on with those that they began with.

        LayoutMismatch: one has no initialiser, or one of another shape or dtype; nothing was changed.
        """
        # Not `SessionOptions.add_initializer`: constants would be folded with the file's values.
        new = onnx.ModelProto()
        new.CopyFrom(self._model)
        initialisers = {one.name: one for one in new.graph.initializer}
        for name, initialiser in (self._names or dict(zip(weights, weights, strict=True))).items():
            if name not in weights or initialiser not in initialisers:
                raise LayoutMismatch(f"there is no weight '{name}', or no initialiser '{initialiser}'")
            own, array = initialisers[initialiser], weights[name]
            has, wants = weights.dtypes[name], helper.tensor_dtype_to_np_dtype(own.data_type).name
            if (has, array.shape) != (wants, tuple(own.dims)):
                raise LayoutMismatch(f"'{name}' is {has}{[*array.shape]}, not {wants}{[*own.dims]}")
            own.CopyFrom(helper.make_tensor(own.name, own.data_type, own.dims, array.tobytes(), raw=True))
        self._session, self.version = self._built(new), weights.version
