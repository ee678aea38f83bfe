"""What takes weights in a worker: a module, a mapping of tensors, or a function that loads them into an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from wsync.errors import LayoutMismatch
from wsync.weights.binding import Binding, Target
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot, is_module, is_stacked, snapshot
from wsync.weights.tensors import copy_into_model, zeros

if TYPE_CHECKING:
    from wsync.transforms.chain import Chain

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""Takes the ``(name, tensor)`` pairs of one version, all of them before it returns. The tensors are valid during the
call, and must not be written.

If it raises after it has taken a pair, the engine may have weights of two versions, and forwards inside the gate are
refused until a version is loaded. ``LayoutMismatch`` means that it has changed nothing: forwards go on."""


def mixed_weights(where: str, version: str) -> str:
    """Return the text of the error for mixed weights: ``version`` was not installed completely."""
    return f"{where} may have weights of two versions, because the install of {version} failed half-way: send again"


class Loader(Target):
    """Weights that have no module here: an inference engine's own loading function.

    ``mixed`` is False also if ``load`` had not taken any pair, or has raised ``LayoutMismatch``.
    """

    def __init__(self, load: Load, layout: Layout) -> None:
        self._load = load
        self._names = layout.names

    def install(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        """Load all pairs; TypeError: ``load`` has not taken them, as a coroutine function, which has not run."""
        taken, before = 0, self.mixed

        def pairs() -> Iterator[tuple[str, Tensor]]:
            nonlocal taken
            for pair in zip(self._names, views, strict=True):
                taken += 1
                self.mixed = True
                yield pair

        try:
            self._load(pairs())
        except LayoutMismatch:
            self.mixed = before  # ``load`` says that it has changed nothing
            raise
        if taken < len(views):
            name = getattr(self._load, "__qualname__", self._load)
            raise TypeError(
                f"{name} returned when it had taken {taken} of {len(views)} pairs: load= is a plain function "
                "(no async def) that takes all of them"
            )
        self.mixed = False


class Tensors(Target):
    """A mapping of tensors (a state dict or TensorDict): each version is copied into those that it has then.

    Raises:
        LayoutMismatch: it has other names, shapes or dtypes, or a tensor that cannot be copied into.
    """

    def __init__(
        self, destination: TensorDictBase | Mapping[str, Any], layout: Layout, owner: str = "the worker's tensors"
    ) -> None:
        if is_stacked(destination):
            raise LayoutMismatch("a lazily stacked TensorDict has no tensors to copy into: make it contiguous first")
        self._destination, self._layout, self._owner = destination, layout, owner
        self._current()

    def _current(self) -> list[Tensor]:
        """Return the destination's tensors in the layout's order, checked. Read anew: an entry may be replaced."""
        return self._layout.fit(snapshot(self._destination).tensors, self._owner, writable=True)

    def install(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        """Copy the weights; LayoutMismatch: they no longer fit, or tied tensors were sent different values."""
        tensors = self._checked(views)
        self.mixed = True
        copy_into_model(tensors, views)
        self.mixed = False

    def check_only(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        """Raise what ``install`` would raise before it copies."""
        self._checked(views)

    def _checked(self, views: Sequence[Tensor]) -> list[Tensor]:
        tensors = self._current()
        self._layout.require_same_values(self._layout.tied_only_in(tensors), views)
        return tensors


class Transformed(Target):
    """Weights that pass through ``receive_transform`` on their way into another target, which ``make`` returns.

    No extra state is installed where the transform selects. LayoutMismatch: transform or target do not fit.
    """

    def __init__(self, layout: Layout, transform: Chain, make: Callable[[Layout], Target]) -> None:
        self._names, self._transform = layout.names, transform
        extra = None if layout.extra is None or transform.selects else dict.fromkeys(layout.extra)
        more = layout.model_may_have_more or transform.selects
        zero = layout.views(zeros(layout.nbytes))  # only the kinds of the tensors matter
        result = transform(dict(zip(layout.names, zero, strict=True)))
        self._layout = Layout.of(Snapshot(result, extra, model_may_have_more=more))
        self._target = make(self._layout)
        self.detach = self._target.detach

    def install(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        """Install the transformed weights."""
        self._give(self._target.install, views, extra)

    def check_only(self, views: Sequence[Tensor], extra: Mapping[str, Any] | None = None) -> None:
        """Transform the weights, and check whether the other target would take the result."""
        self._give(self._target.check_only, views, extra)

    def _give(self, take: Callable[..., None], views: Sequence[Tensor], extra: Mapping[str, Any] | None) -> None:
        result = self._transform(dict(zip(self._names, views, strict=True)), strict=False)
        try:
            take(self._layout.order(Snapshot(result)), None if self._transform.selects else extra)
        finally:
            self.mixed, self.misfit = self._target.mixed, self._target.misfit


class Destination:
    """Where a worker's weights go, before their layout is known.

    Args:
        model: a module or a mapping of tensors; None with ``load``.
        load: a function that takes the pairs of one version.
        transform: applied to received weights first.

    Raises:
        TypeError: ``model`` is neither a module nor a mapping of tensors.
    """

    def __init__(self, model: Any = None, *, load: Load | None = None, transform: Chain | None = None) -> None:
        if load is None and not isinstance(model, nn.Module | TensorDictBase | Mapping):
            raise TypeError(f"a receiver's model is a module, a TensorDict or a dict of tensors, not {model!r}")
        self.model, self._load, self._transform = model, load, transform

    @property
    def module(self) -> nn.Module | None:
        """The model, if it is a module: its forwards pass through the gate."""
        return self.model if is_module(self.model) else None

    def target(self, layout: Layout, *, bind: bool) -> Target:
        """Return what takes weights of ``layout``; ``bind``: whether parameters may be bound to received memory.

        An earlier target is detached first, by the caller. LayoutMismatch: the weights do not fit.
        """
        if self._transform is None:
            return self._plain(layout, bind)
        return Transformed(layout, self._transform, lambda result: self._plain(result, False))

    def _plain(self, layout: Layout, bind: bool) -> Target:
        if self._load is not None:
            return Loader(self._load, layout)
        if self.module is not None:
            return Binding(self.module, layout, bind=bind)
        return Tensors(self.model, layout)
