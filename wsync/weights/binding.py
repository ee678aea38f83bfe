"""A model in a worker and the weights that it is given: checked first, then switched, or left as it was."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from wsync import loops
from wsync.errors import LayoutMismatch
from wsync.loops.tensors import is_sharded
from wsync.weights.clean_thread import in_clean_thread
from wsync.weights.fitting import checked_tensors
from wsync.weights.layout import Layout
from wsync.weights.overlaps import is_expanded
from wsync.weights.snapshot import ModuleIndex, describe


def dump_extra(extra: Mapping[str, Any] | None) -> bytes:
    """Extra state as bytes; empty for none. A pickle: it goes only from a trainer to its own workers.

    Raises:
        LayoutMismatch: some of it cannot be pickled; names each module's.
    """
    if not extra:
        return b""
    try:
        return pickle.dumps(dict(extra), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        problems = [problem for name, value in extra.items() if (problem := _unpicklable(name, value))]
        raise LayoutMismatch(f"extra state cannot be pickled: {describe(problems)}") from error


def _unpicklable(name: str, value: object) -> str:
    try:
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001  pickle raises what the object's own methods raise, too
        return f"'{name}' ({type(error).__name__}: {error})"
    return ""


def load_extra(blob: bytes) -> dict[str, Any]:
    """The extra state that a trainer dumped."""
    return pickle.loads(blob) if blob else {}


def require_no_extra(extra: bytes, what: str) -> None:
    """Check that an update has no extra state; ``what`` is what cannot be done with it, for the error.

    The layout may have been defined by weights that could not tell (a plain TensorDict), so each update is checked.

    Raises:
        LayoutMismatch: it has some; names each module's.
    """
    if extra:
        raise LayoutMismatch(f"extra state cannot be {what}: {describe(sorted(load_extra(extra)))}")


def unshare(model: nn.Module) -> None:
    """Give a model memory of its own, where another process has it as well.

    ``torch.multiprocessing`` hands a model to a process so: what one trains, or is sent, all the others would have.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in ModuleIndex(model).tensors().values():
        if tensor.layout is not torch.strided or is_sharded(tensor) or not tensor.is_cpu or not tensor.is_shared():
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in copies:  # several may lie in one
            copies[storage.data_ptr()] = storage.clone()
        with torch.inference_mode(False):  # inference tensors could not be used by autograd later
            own, copy = torch.empty(0, dtype=tensor.dtype), copies[storage.data_ptr()]
            tensor.data = own.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_stand_in(tensor: Tensor | None) -> bool:
    return tensor is not None and not isinstance(tensor, nn.Parameter)


def _accumulators(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """What keeps alive the node by which autograd accumulates gradients of each parameter; it takes no memory.

    PyTorch makes that node while it holds a lock of the parameter and waits for the interpreter's lock; a thread that
    binds the parameter holds the interpreter's lock and waits for the parameter's. So a thread that reads a parameter
    outside the gate and one that installs an update could deadlock. If the node exists, no thread takes both locks.
    """
    return [
        (parameter.narrow(0, 0, 0) if parameter.dim() else parameter).clone()
        for parameter in parameters
        if parameter.requires_grad and type(parameter) is nn.Parameter and not parameter.is_inference()
    ]


class Binding:
    """The plan by which one model takes on weights of one layout.

    Parameters are bound (``p.data = view``, no copy) where that is possible and wanted; everything else, buffers
    above all, is copied into the model's own memory.

    Args:
        model: the receiving model.
        layout: what it will be given.
        bind: whether parameters may be bound. False for a worker that trains.

    Attributes:
        installer: switches the model while it does not change; replaced when it has changed.
        mixed: see ``Target``. True from the first write of an install to its last one.

    Raises:
        LayoutMismatch: the model has other names, shapes or dtypes; a tensor in it is sharded, sparse, quantised or
            without memory; or two of them overlap partly in one memory.
    """

    def __init__(self, model: nn.Module, layout: Layout, *, bind: bool = True) -> None:
        self._model = model
        self._layout = layout
        self._bind = bind
        self._bound: list[tuple[nn.Parameter, int]] = []
        self.mixed = False
        self._resolve()

    def _resolve(self) -> None:
        index, layout = ModuleIndex(self._model), self._layout
        own = index.tensors()
        for name, (where, key) in index.parameters.items():
            if _is_stand_in(where[key]):
                raise LayoutMismatch(
                    f"'{name}' of the worker's model is a plain tensor in a parameter's place: hold wsync.gate() "
                    "around functional_call()"
                )
        self._own = self._checked_tensors(own, index)
        # A tensor under several names is installed once, from its first name; `_agree` lists the other names, which
        # must carry the same values where the sender did not tie them.
        seen: dict[int, int] = {}
        before = self._bound
        self._bound = []
        self._copied: list[tuple[Tensor, int]] = []
        self._agree: list[tuple[int, int]] = []
        for i, name in enumerate(layout.names):
            tensor = own[name]
            first = seen.setdefault(id(tensor), i)
            if first != i:
                if layout.offsets[first] != layout.offsets[i]:
                    self._agree.append((first, i))
            elif self._bind and isinstance(tensor, nn.Parameter) and tensor.device.type == "cpu":
                self._bound.append((tensor, i))
            else:
                if is_expanded(tensor):
                    tensor.data = tensor.data.contiguous()  # one place cannot take the values of several elements
                self._copied.append((tensor, i))
        self._agree += layout.tied_elsewhere(self._copied)
        for parameter, _ in before:
            if id(parameter) not in seen:  # taken out of the model: what it is bound to will be written
                parameter.data = parameter.data.clone()
        bound = [parameter for parameter, _ in self._bound]
        self._accumulators = in_clean_thread(_accumulators, bound) if bound else []
        self._index = index
        self._places = list(index.places.values())
        self._tensors = [where[key] for where, key in self._places]
        self._tree = index.tree(list(index.places))
        self.installer = loops.Installer(self._tree, tuple(self._tensors), tuple(self._bound), tuple(self._copied))

    @property
    def may_refuse(self) -> bool:
        """Whether weights that fit the layout may yet be refused, for what they are."""
        undeclared = self._layout.extra is None and bool(self._index.extra)
        return undeclared or bool(self._layout.extra) or bool(self._agree)

    def _checked_tensors(self, own: Mapping[str, Tensor], index: ModuleIndex) -> list[Tensor]:
        layout = self._layout
        problems = [
            f"'{name}' has no memory (it is on the meta device): call to_empty() first"
            for name in layout.names
            if name in own and own[name].is_meta
        ]
        if layout.extra is not None and layout.extra != index.extra.keys():
            problems.append(f"extra state differs: {describe(sorted(layout.extra ^ index.extra.keys()))}")
        return checked_tensors(own, layout, "the worker's model", optional=index.optional, problems=problems)

    def install(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        """Switch the model to ``views`` (ordered like the layout) and ``extra``.

        Raises:
            LayoutMismatch: the model has changed its shape since; or its tied tensors were sent different values.
            Exception: whatever a module's ``set_extra_state`` or PyTorch raised. The model is as it was, unless
                ``mixed``.
        """
        self._check_current(views)
        if extra:
            self._set_extra(extra)
        self.mixed = True
        self.installer.apply(views)
        self.mixed = False

    def check_only(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        """Find out whether ``install`` would succeed, and leave the model as it is. Call it inside the gate.

        Raises:
            LayoutMismatch, Exception: what ``install`` would raise.
        """
        self._check_current(views)
        if extra:
            before, mixed = self._index.extra_state(), self.mixed
            self._set_extra(extra)
            self._set_extra(before)
            self.mixed = mixed

    def _check_current(self, views: Sequence[Tensor]) -> None:
        if not (self._is_current() or self._is_lent()) or not self._is_alike(views):
            self._resolve()
        self._layout.require_same_values(self._agree, self._own, views)

    def _is_current(self) -> bool:
        now = self._tree.tensors()
        return now is not None and all(map(is_, now, self._tensors))

    def _is_lent(self) -> bool:
        """Whether plain tensors take the place of parameters for a while, as ``torch.func.functional_call`` has it.

        They belong to the caller. The parameters will come back, and are given the weights meanwhile.
        """
        return self._index.describes(self._model) and any(
            isinstance(tensor, nn.Parameter) and _is_stand_in(where[key])
            for tensor, (where, key) in zip(self._tensors, self._places, strict=True)
        )

    def _is_alike(self, views: Sequence[Tensor]) -> bool:
        """Whether it can take ``views`` and stay what it is: ``.half()`` or ``.to(device)`` may have come between."""
        return all([tensor.dtype is views[i].dtype for tensor, i in (*self._bound, *self._copied)]) and all(
            [parameter.device == views[i].device for parameter, i in self._bound]
        )

    def _set_extra(self, extra: Mapping[str, Any]) -> None:
        """Set extra state, and leave ``mixed`` true; if that fails, set what there was."""
        before, mixed = self._index.extra_state(), self.mixed
        self.mixed = True
        try:
            self._write_extra(extra)
        except BaseException:
            self._write_extra(before)
            self.mixed = mixed
            raise

    def _write_extra(self, extra: Mapping[str, Any]) -> None:
        for name, value in extra.items():
            self._index.extra[name].set_extra_state(value)

    def rebind(self, tensors: Mapping[str, Tensor]) -> None:
        """Bind parameters that are bound, and fit, to other memory of the same values. Call it inside the gate."""
        for parameter, index in self._bound:
            other = tensors.get(self._layout.names[index])
            if other is None or other.data_ptr() == parameter.data_ptr():
                continue
            if other.shape == parameter.shape and other.dtype is parameter.dtype:
                parameter.data = other

    def is_bound_to(self, tensors: Iterable[Tensor]) -> bool:
        """Whether a bound parameter uses the memory of one of ``tensors``; an empty one uses none."""
        places = {tensor.data_ptr() for tensor in tensors if tensor.numel()}
        return any(parameter.data_ptr() in places for parameter, _ in self._bound if parameter.numel())

    def detach(self) -> None:
        """Give bound parameters memory of their own again, with the values that they have."""
        for parameter, _ in self._bound:
            parameter.data = parameter.data.clone()
