"""Weights in ONNX Runtime: a session with a new version is built beside the one that runs, and takes its place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnxruntime import InferenceSession, OrtValue, SessionOptions

from wsync_reader.layout import LayoutMismatch, Weights


class OnnxModel:
    """A model whose initialisers are replaced, version by version. Any thread may call.

    Args:
        model: the ``.onnx`` file, or its bytes.
        names: ``{weight: initialiser}``; by default all weights, which then have the names of initialisers.
        providers: of ONNX Runtime.

    Attributes:
        version: that ``run`` uses; 0: the model's own values.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes,
        names: Mapping[str, str] | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
    ) -> None:
        self._model, self._names, self._providers = model, names, list(providers)
        read = onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model, load_external_data=False)
        self._initialisers = {one.name: (one.data_type, tuple(one.dims)) for one in read.graph.initializer}
        self._running = self._build({}, 0)

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[Any]:
        """Return the outputs, by weights of one version."""
        session, *_ = self._running
        return session.run(outputs, dict(inputs))

    @property
    def version(self) -> int:
        return self._running[2]

    def install(self, weights: Weights) -> None:
        """Use these weights; calls that run go on with those that they began with.

        LayoutMismatch: one has no initialiser, or one of another shape or dtype; nothing was changed.
        """
        values, problems = dict[str, OrtValue](), list[str]()
        for name, initialiser in (self._names or dict(zip(weights, weights, strict=True))).items():
            kind, shape = self._initialisers.get(initialiser, (0, ()))
            if name not in weights or not kind:
                problems.append(f"there is no weight '{name}', or no initialiser '{initialiser}'")
                continue
            array, dtype = weights[name], helper.tensor_dtype_to_np_dtype(kind)
            if (array.shape, weights.dtypes[name]) != (shape, dtype.name):
                problems.append(f"'{name}' is {weights.dtypes[name]}{[*array.shape]}, not {dtype.name}{[*shape]}")
                continue
            dense = np.ascontiguousarray(array)
            if dtype.kind in "?biufc":
                values[initialiser] = OrtValue.ortvalue_from_numpy(dense)
            else:  # bfloat16, float8
                values[initialiser] = OrtValue.ortvalue_from_numpy_with_onnx_type(
                    dense.view(f"u{dense.itemsize}"), kind
                )
        if problems:
            raise LayoutMismatch(f"version {weights.version} does not fit the model: {'; '.join(problems[:8])}")
        self._running = self._build(values, weights.version)

    def _build(self, values: Mapping[str, Any], version: int) -> tuple[InferenceSession, Mapping[str, Any], int]:
        options = SessionOptions()
        for name, value in values.items():
            options.add_initializer(name, value)
        model = self._model if isinstance(self._model, bytes) else os.fspath(self._model)
        return InferenceSession(model, options, providers=self._providers), values, version  # it reads their memory
