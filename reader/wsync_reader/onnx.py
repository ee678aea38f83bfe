"""Weights in ONNX Runtime: a session with a new version is built beside the one that runs, and takes its place."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from wsync_reader.layout import LayoutMismatch, Weights


class OnnxModel:
    """The model in a ``.onnx`` file, whose initialisers are replaced, version by version. Any thread may call.

    ``names``: ``{weight: initialiser}``; by default all weights, which then have the names of initialisers. ``options``
    are those of ``InferenceSession``. ``version`` is what ``run`` uses; 0 for the file's own values.
    """

    def __init__(self, path: str | os.PathLike[str], names: Mapping[str, str] | None = None, **options: Any) -> None:
        self._path, self._names = os.fspath(path), names
        self._options = {"providers": ["CPUExecutionProvider"], **options}
        graph = onnx.load(self._path, load_external_data=False).graph
        self._initialisers = {one.name: (one.data_type, tuple(one.dims)) for one in graph.initializer}
        self._running, self.version = self._build({}), 0

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None) -> Sequence[Any]:
        """Return the outputs, by weights of one version."""
        return self._running[0].run(outputs, dict(inputs))

    def install(self, weights: Weights) -> None:
        """Use these weights; calls that run go on with those that they began with.

        LayoutMismatch: one has no initialiser, or one of another shape or dtype; nothing was changed.
        """
        values = dict[str, Any]()
        for name, initialiser in (self._names or dict(zip(weights, weights, strict=True))).items():
            if name not in weights or initialiser not in self._initialisers:
                raise LayoutMismatch(f"there is no weight '{name}', or no initialiser '{initialiser}'")
            array, (kind, shape) = np.ascontiguousarray(weights[name]), self._initialisers[initialiser]
            has, wants = weights.dtypes[name], helper.tensor_dtype_to_np_dtype(kind).name
            if (has, weights[name].shape) != (wants, shape):
                raise LayoutMismatch(f"'{name}' is {has}{[*weights[name].shape]}, not {wants}{[*shape]}")
            raw = array.view(f"u{array.itemsize}") if "float8" in has or has == "bfloat16" else array
            values[initialiser] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw.reshape(shape), kind)
        self._running, self.version = self._build(values), weights.version

    def _build(self, values: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        options: Any = ort.SessionOptions()  # type: ignore[attr-defined]
        for name, value in values.items():
            options.add_initializer(name, value)
        return ort.InferenceSession(self._path, options, **self._options), values  # whose memory the session reads
