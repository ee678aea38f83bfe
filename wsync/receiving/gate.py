"""Nobody changes a model while its forward runs.

One re-entrant gate per process, for all synchronised models in it. A forward of a gated model holds it. On the way in
from outside, and only there, each model's *feed* is asked for news and installs it; so a forward sees one version from
its first layer to its last. The receiver thread installs by passing through the gate as well: it waits for the lock
(it does not merely try it), so nothing that it was told of can be stranded when the last forward leaves.

What goes around the gate: ``model.forward(...)`` called directly, a submodule called on its own, plain reads of
parameters, and of an output that is a view of one. Hold the gate yourself for those, and around forward *and* backward
in a worker that trains::

    with wsync.gate():
        loss = model(x).sum()
        loss.backward()
"""

from __future__ import annotations

import copyreg
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar

from torch import nn

from wsync import native
from wsync.deadlines import remaining


class Feed(Protocol):
    """Where a model's news comes from, as the gate sees it."""

    def enter(self) -> bool:
        """A forward is about to start: install the newest version. True if that decided for other feeds as well."""
        ...

    def leave(self) -> None:
        """The outermost forward has ended, or never began; must be harmless when repeated."""
        ...


class Turnstile:
    """The lock, how deep its holder is inside, and the feeds to ask on the way in. ``_native.Turnstile`` is the same.

    Args:
        lock: re-entrant.
    """

    def __init__(self, lock: Any) -> None:
        # `with lock` is atomic towards signals; the depth is restored, not counted down. So the gate opens again
        # whatever a forward raised, and wherever a KeyboardInterrupt struck.
        self.lock = lock
        self.depth = 0
        self.feeds: tuple[Feed, ...] = ()

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` inside."""
        with self.lock:
            depth = self.depth
            try:
                self.enter(depth)
                return function(*args, **kwargs)
            finally:
                self.depth = depth  # not in a function of Python's: at its beginning a signal may strike
                self.leave(depth)

    def go_through(self) -> None:
        """In and out again: what there is to install is installed on the way."""
        self.call(bool)

    def enter(self, depth: int) -> None:
        """Go in, with the lock held, from ``depth``."""
        self.depth = depth + 1
        if depth == 0:
            # A decision found by one feed switches others too, which then must look again.
            while any([feed.enter() for feed in self.feeds]):
                pass

    def leave(self, depth: int) -> None:
        """Tell the feeds, if ``depth`` is outside."""
        if depth == 0:
            for feed in self.feeds:
                feed.leave()


class Gate:
    """What every forward of a synchronised model passes through."""

    def __init__(self) -> None:
        lock = threading.RLock()
        self.turnstile = native.turnstile(lock) or Turnstile(lock)
        self.call = self.turnstile.call  # what ``hold`` does, without its generator

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep every synchronised model of this process at one version."""
        turnstile = self.turnstile
        with turnstile.lock:
            depth = turnstile.depth
            try:
                turnstile.enter(depth)
                yield
            finally:
                turnstile.depth = depth  # see Turnstile.call
                turnstile.leave(depth)

    def call_before(self, deadline: float | None, function: Callable[..., Any], *args: Any) -> Any | None:
        """``function(*args)`` inside, by a thread that is outside; None if nobody let it in before ``deadline``."""
        lock, left = self.turnstile.lock, remaining(deadline)
        try:
            return self.call(function, *args) if lock.acquire(timeout=-1 if left is None else left) else None
        finally:
            try:  # noqa: SIM105  a signal may strike where suppress() begins
                lock.release()
            except RuntimeError:  # it was not acquired; or it was, and a signal has struck before anything else
                pass

    @property
    def held_here(self) -> bool:
        """Whether the calling thread is inside."""
        turnstile = self.turnstile
        return turnstile.lock._is_owned() and turnstile.depth > 0  # nobody else's: the lock is this thread's

    def attach(self, feed: Feed) -> None:
        """Ask ``feed`` for news from now on."""
        with self.turnstile.lock:
            self.turnstile.feeds = (*self.feeds, feed)

    def detach(self, feed: Feed) -> None:
        """Ask ``feed`` no more."""
        with self.turnstile.lock:
            self.turnstile.feeds = tuple(other for other in self.feeds if other is not feed)

    @property
    def feeds(self) -> Sequence[Feed]:
        """Those that are asked."""
        return self.turnstile.feeds


_gate = Gate()


def _reset_in_child() -> None:
    """A forked child has none of its parent's receivers, and the lock may be held by a thread that it lacks."""
    global _gate
    _gate = Gate()


os.register_at_fork(after_in_child=_reset_in_child)


def process_gate() -> Gate:
    """The gate of this process."""
    return _gate


def gate() -> Any:
    """A context manager that keeps every synchronised model of this process at one version while it is open.

    Re-entrant: forwards inside it change nothing. An update that arrives meanwhile is installed after it.
    """
    return _gate.hold()


P = ParamSpec("P")
R = TypeVar("R")


def gated(function: Callable[P, R]) -> Callable[P, R]:
    """A function that does what ``function`` does, inside ``gate()``; a fraction of the time that ``with`` takes."""

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        return _gate.call(function, *args, **kwargs)

    return inside


_ORIGINAL = "_wsync_original"  # in a gated class's own namespace: the class that it was made from
_gated: weakref.WeakKeyDictionary[type[nn.Module], weakref.ref[type[nn.Module]]] = weakref.WeakKeyDictionary()


def guard(module: nn.Module) -> None:
    """Make every call of ``module`` pass through the gate.

    The module gets a subclass of its class, of the same name. Nothing is stored inside it: copies and pickles of it
    are of the original class, and ungated.
    """
    original = type(module)
    if _ORIGINAL in vars(original):
        return
    known = _gated.get(original)
    gated = None if known is None else known()
    if gated is None:
        gated = _gated_class(original)
        _gated[original] = weakref.ref(gated)
    module.__class__ = gated


def release(module: nn.Module) -> None:
    """Give ``module`` its own class back."""
    original = vars(type(module)).get(_ORIGINAL)
    if original is not None:
        module.__class__ = original


def _new(cls: type, *arguments: Any) -> Any:
    """An empty instance, as unpickling needs it."""
    return cls.__new__(cls, *arguments)


def _gated_class(original: type[nn.Module]) -> type[nn.Module]:
    inner = original.__call__

    @functools.wraps(inner)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _gate.call(inner, self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        function, arguments, *rest = original.__reduce_ex__(self, protocol)
        if function is copyreg.__newobj__:  # pyright: ignore[reportAttributeAccessIssue]
            function = _new  # pickle refuses the other one for an object whose class is not the named one
        return (function, tuple(original if item is type(self) else item for item in arguments), *rest)

    namespace = {
        _ORIGINAL: original,
        "__call__": __call__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    metaclass: Any = type(original)
    return metaclass(original.__name__, (original,), namespace)
