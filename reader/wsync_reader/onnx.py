"""Weights in ONNX Runtime: a session with a new version is built beside the one that runs, and takes its place."""

from __future__ import annotations

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

    ``names``: ``{weight: initialiser}``; by default all weights, which then have the names of initialisers. ``version``
    is what ``run`` uses; 0 for the file's own values.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        names: Mapping[str, str] | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
    ) -> None:
        self._path, self._names, self._providers = os.fspath(path), names, list(providers)
        graph = onnx.load(self._path, load_external_data=False).graph
        self._initialisers = {one.name: (one.data_type, tuple(one.dims)) for one in graph.initializer}
        self._running = self._build({}, 0)

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None) -> Sequence[Any]:
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
        values, problems = dict[str, Any](), list[str]()
        for name, initialiser in (self._names or dict(zip(weights, weights, strict=True))).items():
            kind, shape = self._initialisers.get(initialiser, (0, ()))
            dtype = helper.tensor_dtype_to_np_dtype(kind).name if kind else ""
            if name not in weights or not kind:
                problems.append(f"there is no weight '{name}', or no initialiser '{initialiser}'")
            elif (weights[name].shape, weights.dtypes[name]) != (shape, dtype):
                has = f"{weights.dtypes[name]}{[*weights[name].shape]}"
                problems.append(f"'{name}' is {has}, not {dtype}{[*shape]}")
            else:
                dense = np.ascontiguousarray(weights[name]).reshape(shape)
                dense = dense.view(f"u{dense.itemsize}") if "float8" in dtype or dtype == "bfloat16" else dense
                values[initialiser] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(dense, kind)
        if problems:
            raise LayoutMismatch(f"version {weights.version} does not fit the model: {'; '.join(problems[:8])}")
        self._running = self._build(values, weights.version)

    def _build(self, values: Mapping[str, Any], version: int) -> tuple[Any, Mapping[str, Any], int]:
        options: Any = ort.SessionOptions()  # type: ignore[attr-defined]
        for name, value in values.items():
            options.add_initializer(name, value)
        session = ort.InferenceSession(self._path, options, providers=self._providers)
        return session, values, version  # the session reads the memory of the values
