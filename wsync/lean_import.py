"""Imports tensordict without torch's compiler, which takes as long as all the rest: seconds, in every process.

As it is imported, tensordict remarks how ``torch.compile`` shall treat a few of its functions, and torch imports the
compiler only to hear that. Here it is noted instead, and said as soon as anybody does import the compiler: who
compiles finds everything as ever. Where either of the two has been imported already, nothing is done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch.compiler

_COMPILER = "torch._dynamo"
_REMARKS = ("allow_in_graph", "assume_constant_result")  # in ``torch.compiler``: takes a function, and returns it
Remark = Callable[[Any], Any]


class _Notes(MetaPathFinder):
    """What the compiler has to be told. Is asked for every module that is imported, until one is the compiler."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, Any]] = []

    def noting(self, name: str, remark: Remark) -> Remark:
        """A remark that is noted, while there is nobody to hear it."""

        def note(function: Any) -> Any:
            if _COMPILER in sys.modules or not callable(function):
                return remark(function)
            self._noted.append((name, function))
            return function

        return note

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The compiler, where everybody finds it; it will be told."""
        if fullname != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                for name, function in self._noted:
                    getattr(module, name)(function)

            loader.exec_module = execute_and_tell
        return spec


def _import_tensordict() -> None:
    notes, remarks = _Notes(), {name: getattr(torch.compiler, name) for name in _REMARKS}
    sys.meta_path.insert(0, notes)
    for name, remark in remarks.items():
        setattr(torch.compiler, name, notes.noting(name, remark))
    try:
        import_module("tensordict.nn")
    finally:
        for name, remark in remarks.items():
            setattr(torch.compiler, name, remark)


if _COMPILER not in sys.modules and "tensordict" not in sys.modules:
    _import_tensordict()
