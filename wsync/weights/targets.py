"""What takes weights in a worker: a module, a mapping of tensors, or a function that loads them into an engine.

Weights are checked first. Then the worker has all of them, or is left as it was.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor, nn

from wsync.errors import LayoutMismatch
from wsync.native import native
from wsync.weights.layout import Layout
from wsync.weights.snapshot import ModuleIndex, Snapshot, is_module, snapshot
from wsync.weights.tensors import copy_into_model, defect_of, describe, in_clean_thread, zeros

if TYPE_CHECKING:
    from wsync.transforms import Chain

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""Takes the ``(name, tensor)`` pairs of one version, all of them before it returns. The tensors are valid during the
call, and must not be written. If it raises ``LayoutMismatch``, it has changed nothing. If it raises another error after
it has taken a pair, forwards inside the gate are refused until a version is loaded: the engine may have weights of two.
"""


def dump_extra(extra: Mapping[str, Any] | None) -> bytes:
    """Return extra state as bytes; empty for none. LayoutMismatch: some of it cannot be pickled."""
    try:
        return pickle.dumps(dict(extra), protocol=pickle.HIGHEST_PROTOCOL) if extra else b""
    except Exception as error:  # pickle raises what the object's own methods raise, too
        problem = f"{describe(sorted(extra or ()))} ({type(error).__name__}: {error})"
        raise LayoutMismatch(f"extra state cannot be pickled: {problem}") from error


def load_extra(blob: bytes) -> dict[str, Any]:
    """Return the extra state that a trainer dumped."""
    return pickle.loads(blob) if blob else {}


def require_no_extra(extra: bytes, what: str) -> None:
    """Raise ``LayoutMismatch`` if there is extra state, which cannot be ``what`` (``"stored"``)."""
    if extra:
        raise LayoutMismatch(f"extra state cannot be {what}: {describe(sorted(load_extra(extra)))}")


def unshare(model: nn.Module) -> None:
    """Give a model memory of its own, where another process has it as well.

    ``torch.multiprocessing`` hands a model to a process so: what one trains, or is sent, all the others would have.
    """
    for tensor in ModuleIndex(model).tensors().values():
        if not defect_of(tensor) and tensor.is_cpu and tensor.is_shared():
            with torch.inference_mode(False):  # inference tensors could not be used by autograd later
                tensor.data = tensor.data.clone()


def _accumulators(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return what keeps alive the node by which autograd accumulates gradients of each parameter; it takes no memory.

    PyTorch makes that node under a lock of the parameter, and then takes the interpreter's; a thread that binds the
    parameter takes them in the other order. If the node exists, a read outside the gate cannot deadlock.
    """
    return [
        (parameter.narrow(0, 0, 0) if parameter.dim() else parameter).clone()
        for parameter in parameters
        if parameter.requires_grad and type(parameter) is nn.Parameter
    ]


def _aliased(tensors: Iterable[Tensor]) -> set[int]:
    """Return the storages of a model to which something else refers as well: a view, a NumPy array, a kept state dict.

    Such an alias follows a copy into the tensor's memory, and would not notice that the tensor is bound elsewhere.
    """
    storages = [tensor.untyped_storage() for tensor in {id(one): one for one in tensors}.values()]
    own = Counter(storage._cdata for storage in storages)
    use_count: Any = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]
    return {cdata for cdata, count in own.items() if use_count(cdata) > count + 1}  # one for the list above


class Target(Protocol):
    """What takes weights of one layout. Its methods are called inside the gate."""

    may_refuse = True  # whether ``install`` may raise although the layout fits
    mixed = False  # whether the last ``install`` has failed so that there may be weights of two versions
    misfit = False  # whether the last update has found that the model has changed its structure, and does not fit

    def install(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        """Take over ``views``, in the layout's order, and extra state; what it raises reaches the trainer."""
        ...

    def check_only(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> object:
        """Raise what ``install`` would raise, as far as that can be found out; changes nothing."""

    def detach(self) -> None:
        """Stop using received memory: copy what is bound to it."""


class Binding(Target):
    """The plan by which one model takes on weights of one layout; LayoutMismatch: they do not fit.

    Each tensor is bound (``p.data = view``, no copy) or copied into. Bound are parameters, if ``bind`` is true and
    nothing else has their memory, until ``detach``.
    """

    def __init__(self, model: nn.Module, layout: Layout, *, bind: bool = True) -> None:
        self._model, self._layout, self._bind = model, layout, bind
        self._bound: list[tuple[Tensor, int]] = []
        self._resolve()

    def _resolve(self) -> None:
        index, layout = ModuleIndex(self._model), self._layout
        tensors = index.tensors()
        stand_ins = [name for name in index.parameters if not isinstance(tensors[name], nn.Parameter)]
        if stand_ins:
            raise LayoutMismatch(
                f"'{stand_ins[0]}' of the worker's model is a plain tensor in a parameter's place: hold wsync.gate() "
                "around functional_call()"
            )
        own = layout.order(Snapshot(tensors, index.extra, frozenset(index.optional)), "the worker's model")
        self._agree = layout.tied_only_in(own)
        before, aliased = {id(parameter): parameter for parameter, _ in self._bound}, _aliased(own)
        self._bound, self._copied = [], list[tuple[Tensor, int]]()
        bindable = index.parameters - index.self_written if self._bind else set[str]()
        firsts = dict[int, int]()
        for i, (name, tensor) in enumerate(zip(layout.names, own, strict=True)):
            if firsts.setdefault(id(tensor), i) != i:
                continue  # another name of the same tensor
            usable = tensor.is_cpu and not tensor.is_inference()  # else the next forward would raise
            apart = id(tensor) in before or tensor.untyped_storage()._cdata not in aliased
            (self._bound if usable and apart and name in bindable else self._copied).append((tensor, i))
        bound = [parameter for parameter, _ in self._bound]
        for one in {*before} - {*map(id, bound)}:  # taken out of the model, or copied from now on
            before[one].data = before[one].data.clone()
        self._accumulators = in_clean_thread(_accumulators, bound) if bound else []
        self.may_refuse = bool(self._agree or layout.extra or (layout.extra is None and index.extra))
        self._index, self._tensors = index, [*tensors.values()]
        parts = tuple(self._tensors), tuple(self._bound), tuple(self._copied)
        self.installer = native.Installer(index.tree, *parts) if native is not None else None  # of the model as it is

    def install(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        """Switch the model, or leave it as it was, unless ``mixed``.

        LayoutMismatch: the model has changed its shape since; or its tied tensors were sent different values.
        """
        self._check_current(views)
        if extra:
            self._set_extra(extra)
        self.mixed = True
        if self._copied:
            copy_into_model([tensor for tensor, _ in self._copied], [views[i] for _, i in self._copied])
        for parameter, i in self._bound:
            parameter.data = views[i]
        torch.clear_autocast_cache()  # which has casts of the old parameters
        self.mixed = False

    def check_only(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        self._check_current(views)
        if extra:
            before, mixed = self._index.extra_state(), self.mixed
            self._set_extra(extra)
            self._set_extra(before)
            self.mixed = mixed

    def detach(self) -> None:
        for parameter, _ in self._bound:
            parameter.data = parameter.data.clone()

    def _check_current(self, views: Sequence[Tensor]) -> None:
        now = self._index.current()  # others inside ``functional_call``
        same = now is not None and all(map(is_, now, self._tensors))
        # ``.half()`` or ``.to(device)`` may have come between.
        same = same and all([tensor.dtype is views[i].dtype for tensor, i in (*self._bound, *self._copied)])
        if not same or not all([parameter.device == views[i].device for parameter, i in self._bound]):
            self.misfit = True
            self._resolve()
        self.misfit = False
        self._layout.require_same_values(self._agree, views)

    def _set_extra(self, extra: Mapping[str, Any]) -> None:
        """Set extra state, and leave ``mixed`` true; if that fails, set back what there was."""
        before, mixed = self._index.extra_state(), self.mixed
        self.mixed = True
        try:
            for name, value in extra.items():
                self._index.extra[name].set_extra_state(value)
        except Exception:
            for name, value in before.items():
                self._index.extra[name].set_extra_state(value)
            self.mixed = mixed
            raise


class Loader(Target):
    """A function that loads weights into an engine. ``mixed`` stays False if it had taken no pair when it raised."""

    def __init__(self, load: Load, layout: Layout) -> None:
        self._load, self._names = load, layout.names

    def install(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        """TypeError: ``load`` has not taken all pairs, as a coroutine function, which has not run."""
        pairs, before = zip(self._names, views, strict=True), self.mixed

        def each() -> Iterator[tuple[str, Tensor]]:
            for pair in pairs:
                self.mixed = True
                yield pair

        try:
            self._load(each())
        except LayoutMismatch:
            self.mixed = before  # ``load`` says that it has changed nothing
            raise
        left = len([*pairs])
        if left:
            name = getattr(self._load, "__qualname__", self._load)
            raise TypeError(
                f"{name} returned without having taken {left} of {len(views)} pairs: load= is a plain function "
                "(no async def) that takes all of them"
            )
        self.mixed = False


class Tensors(Target):
    """A mapping of tensors (a state dict or TensorDict): each version is copied into those that it has then."""

    def __init__(
        self, destination: TensorDictBase | Mapping[str, Any], layout: Layout, owner: str = "the worker's tensors"
    ) -> None:
        nested = destination.values(True, False) if isinstance(destination, TensorDictBase) else ()
        if any(isinstance(part, LazyStackedTensorDict) for part in (destination, *nested)):
            raise LayoutMismatch("a lazily stacked TensorDict has no tensors to copy into: make it contiguous first")
        self._destination, self._layout, self._owner = destination, layout, owner
        self.check_only(())

    def install(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        tensors = self.check_only(views)
        self.mixed = True
        copy_into_model(tensors, views)
        self.mixed = False

    def check_only(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> list[Tensor]:
        """Return the tensors to copy into, found anew: an entry may be replaced. Without views, check only those."""
        tensors = self._layout.order(Snapshot(snapshot(self._destination).tensors), self._owner)
        if views:
            self._layout.require_same_values(self._layout.tied_only_in(tensors), views)
        return tensors


class Transformed(Target):
    """Weights that pass through ``receive_transform`` on their way into a model or a function.

    No extra state is installed where the transform selects. LayoutMismatch: transform or model do not fit.
    """

    def __init__(self, layout: Layout, transform: Chain, destination: Destination) -> None:
        self._names, self._transform = layout.names, transform
        zero = layout.views(zeros(layout.nbytes))  # only the kinds of the tensors matter
        extra = None if layout.extra is None else dict.fromkeys(layout.extra)
        given = self._named(zero, extra)._replace(model_may_have_more=layout.model_may_have_more)
        self._layout = Layout.of(given.through(transform, strict=True))
        self._target = destination.target(self._layout, bind=False)
        self.detach = self._target.detach

    def install(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        self._give(self._target.install, views, extra)

    def check_only(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        self._give(self._target.check_only, views, extra)

    def _give(self, take: Callable[..., object], views: Sequence[Tensor], extra: Mapping[str, Any] | None) -> None:
        result = self._named(views, extra).through(self._transform)
        try:
            take(self._layout.order(result._replace(extra=None)), result.extra)
        finally:
            self.mixed, self.misfit = self._target.mixed, self._target.misfit

    def _named(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None) -> Snapshot:
        return Snapshot(dict(zip(self._names, views, strict=True)), extra)


class Destination:
    """Where a worker's weights go, before their layout is known; TypeError: the model is of another kind.

    ``model`` is a module or a mapping of tensors; None with ``load``. ``transform`` is applied to received weights.
    """

    def __init__(self, model: Any = None, *, load: Load | None = None, transform: Chain | None = None) -> None:
        if load is None and not isinstance(model, nn.Module | TensorDictBase | Mapping):
            raise TypeError(f"a receiver's model is a module, a TensorDict or a dict of tensors, not {model!r}")
        self.model, self._load, self._transform = model, load, transform

    @property
    def module(self) -> nn.Module | None:
        """The model, if it is a module: its forwards pass through the gate."""
        return self.model if is_module(self.model) else None

    def extra_of(self, blob: bytes) -> dict[str, Any]:
        """Return extra state for a module. A function and a mapping take none, and nothing is unpickled for them."""
        return load_extra(blob) if self._load is None and self.module is not None else {}

    def target(self, layout: Layout, *, bind: bool) -> Target:
        """Return what takes weights of ``layout``; LayoutMismatch: they do not fit. Detach an earlier target first."""
        if self._transform is not None:
            return Transformed(layout, self._transform, Destination(self.model, load=self._load))
        if self._load is not None:
            return Loader(self._load, layout)
        return Tensors(self.model, layout) if self.module is None else Binding(self.module, layout, bind=bind)
