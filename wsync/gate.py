"""The gate: no model changes while its forward runs.

There is one re-entrant gate per process, for all synchronised models in it. A forward of a gated model holds it. Each
receiver has a *hook*, the object that installs its updates (``GateHook``). Further hooks bind models to tensors
that the user shares (``RegisteredBinder``), and refuse forwards of a model with mixed weights (``MixedWeightsGuard``).
When a thread that does not hold the gate yet enters it, and only then, the gate has each hook install a pending update;
so a forward sees one version from its first layer to its last. When the thread leaves the gate, each hook releases what
the forward used (a slot of shared memory). An error of a hook is raised in the caller of the forward. An error
that forbids the use of one model is raised only for forwards that may use that model (``entered_for_forward_of``).

The receiver thread installs by passing through the gate too. It blocks on the lock, so a pending update is installed as
soon as the running forward ends, even if no other forward follows. In shared memory it is not woken if no
acknowledgement is awaited and no thread waits in ``receive``: the next forward, or ``pull``, installs the update.

What bypasses the gate, such as ``model.forward(...)``, a submodule called on its own, or a plain read of a parameter
(docs/lifecycle.md has all), may see two versions. Hold the gate for it, and around forward *and* backward::

    with wsync.gate():
        loss = model(x).sum()
        loss.backward()
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from torch import nn

from wsync import loops
from wsync.deadlines import remaining
from wsync.errors import WeightSyncError
from wsync.loops.gate_state import GateHook

P = ParamSpec("P")
R = TypeVar("R")


class Gate:
    """The gate of one process.

    Attributes:
        gate_state: the state of the gate, in Python or compiled: an RLock (``lock``), how often the holder has entered
            (``depth``), and the hooks. Acquiring ``lock`` alone does not enter the gate: no hook is called, and nothing
            is installed.
        call: ``call(function, *args, **kwargs)`` calls ``function`` inside the gate; faster than ``hold``.
    """

    def __init__(self) -> None:
        self.gate_state = loops.GateState(threading.RLock())
        self.call = self.gate_state.call
        self._blocks = 0  # open blocks of ``hold``, in the thread that has the lock
        self._depth_before_first = 0  # the depth when the first of these began; see the end of ``hold``

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep each synchronised model of this process at its version while the block runs. Any thread may use it."""
        gate_state = self.gate_state
        with gate_state.lock:
            depth_before, entered = gate_state.depth, False
            if not depth_before or not self._blocks:  # no block is open (a signal handler may have left `_blocks` > 0)
                self._blocks, self._depth_before_first = 0, depth_before
            self._blocks += 1
            try:
                gate_state.enter(depth_before)
                entered = True
                yield
            finally:
                self._blocks -= 1
                # The blocks of two coroutines may overlap without being nested: A begins (depth 1), B begins (2), A
                # ends. A's depth_before, 0, would open the gate while B's block runs: so the open blocks are counted.
                if entered and gate_state.depth != depth_before + 1:
                    depth_before = self._depth_before_first + self._blocks
                gate_state.depth = depth_before  # leave() sets it too, but a signal handler may raise before it begins
                gate_state.leave(depth_before)

    def call_without_forward(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function``, which runs no forward, inside the gate: see ``without_forward``. In any thread."""
        with without_forward():
            return self.call(function, *args, **kwargs)

    def call_for(self, subject: object, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function`` inside the gate, as if it were a forward of ``subject`` (None: of all models)."""
        return self.gate_state.call_model(lambda _: function(*args, **kwargs), subject)

    def call_with_deadline(
        self, deadline: float | None, subject: object, function: Callable[..., Any], *args: Any
    ) -> Any | None:
        """Wait for the gate's lock until ``deadline``, and do as ``call_for``. None if the lock was not free by then.

        Called by the thread in ``receive()`` or ``pull()``, never inside the gate. ``release`` is always called, since
        a signal handler may raise just after ``acquire``. If the lock was not acquired, its error is ignored.
        """
        lock, left = self.gate_state.lock, remaining(deadline)
        try:
            in_time = lock.acquire(timeout=-1 if left is None else left)
            return self.call_for(subject, function, *args) if in_time else None
        finally:
            try:  # noqa: SIM105  not suppress(): a signal handler may raise in it, and release() would be skipped
                lock.release()
            except RuntimeError:  # it was not acquired
                pass

    @property
    def held_here(self) -> bool:
        """Whether the calling thread is inside the gate."""
        gate_state = self.gate_state
        return gate_state.lock._is_owned() and gate_state.depth > 0  # the depth is 0 if only ``lock`` was acquired

    def attach(self, hook: GateHook) -> None:
        """Call ``hook`` from now on, after those that are attached already. Any thread may call it."""
        with self.gate_state.lock:
            self.gate_state.hooks = (*self.gate_state.hooks, hook)

    def detach(self, hook: GateHook) -> None:
        """Stop calling ``hook``. Any thread may call it."""
        with self.gate_state.lock:
            self.gate_state.hooks = tuple(other for other in self.gate_state.hooks if other is not hook)


_gate = Gate()
_thread_local = threading.local()  # ``without_forward``: true inside a block of ``without_forward``


@contextmanager
def without_forward() -> Iterator[None]:
    """In this block, entering the gate does not count as a forward: ``entered_for_forward_of`` is false.

    Hooks then raise no errors for a forward, and do not wait for a newer version (``max_staleness``). The receiver
    thread always runs in such a block: if it waited, the message that brings the version would not be read. Threads in
    ``connect``, ``receive`` and ``pull`` use it, too.
    """
    before, _thread_local.without_forward = getattr(_thread_local, "without_forward", False), True
    try:
        yield
    finally:
        _thread_local.without_forward = before


def entered_for_forward_of(model: object) -> bool:
    """Return whether the gate was entered for a forward that may use ``model``, or by ``gate()`` or ``gated()``.

    Hooks call it; they neither raise nor wait if it is false. A forward may use the parameters of its own model, of
    models inside it, and of models around it.
    """
    if getattr(_thread_local, "without_forward", False):
        return False
    subject = _gate.gate_state.subject
    if subject is None or subject is model:
        return True
    if not (isinstance(subject, nn.Module) and isinstance(model, nn.Module)):
        return False
    return any(one is model for one in subject.modules()) or any(one is subject for one in model.modules())


class MixedWeightsGuard:
    """A ``GateHook`` that raises an error in a model's forwards; attached while its weights may be of two versions.

    Args:
        model: the model; None for that of an inference engine (``load=``), which is not known.

    Attributes:
        why: the reason; empty while forwards are allowed.
    """

    def __init__(self, model: object) -> None:
        self._model = model
        self.why = ""

    def set(self, why: str) -> None:
        """Make forwards raise, for the reason ``why``; with an empty one, allow them again. Called inside the gate."""
        attached = self in _gate.gate_state.hooks  # false in a forked child: its new gate has no hooks
        self.why = why
        if why and not attached:
            _gate.attach(self)
        elif attached and not why:
            _gate.detach(self)

    def poll_update(self) -> bool:
        """See ``GateHook``; WeightSyncError while weights are mixed, until a whole version is installed."""
        if self.why and entered_for_forward_of(self._model):
            raise WeightSyncError(self.why)
        return False

    def leaving_gate(self) -> None:
        """See ``GateHook``: nothing is in use."""


def _reset_in_child() -> None:
    """Start anew: a child has no receivers, and the lock may be held by a thread that does not exist in the child."""
    global _gate
    _gate = Gate()
    _thread_local.without_forward = False


os.register_at_fork(after_in_child=_reset_in_child)


def process_gate() -> Gate:
    """Return the gate of this process."""
    return _gate


def gate() -> Any:
    """Return a context manager that keeps each synchronised model of this process at its version while it is open.

    Re-entrant: forwards inside it install nothing. An update that arrives meanwhile is installed after it.
    """
    return _gate.hold()


def gated(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls ``function`` inside ``gate()``; much faster than ``with gate()``.

    Raises ``TypeError`` if a call of ``function`` only makes a coroutine or a generator, which would run later.
    """
    runs_later = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(test(function) for test in runs_later):
        raise TypeError(f"gated() takes functions that run when they are called: use gate() inside {function!r}")

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        return _gate.call(function, *args, **kwargs)

    return inside


_ORIGINAL = "_wsync_original"  # attribute of a gated class: the class that it was made from
# Each class that has been gated → its gated subclass.
_gated_classes: weakref.WeakKeyDictionary[type[nn.Module], weakref.ref[type[nn.Module]]] = weakref.WeakKeyDictionary()


def gate_model(module: nn.Module) -> None:
    """Make every call of ``module`` pass through the gate. Called inside the gate, by the thread that connects.

    The module's class is replaced by a subclass of the same name; no attribute is added. A copy or unpickled module has
    the original class, and is not gated (except a copy that the module's own ``__deepcopy__`` makes by ``type(self)``).
    """
    original = type(module)
    if _ORIGINAL in vars(original):
        return
    reference = _gated_classes.get(original)
    subclass = None if reference is None else reference()
    if subclass is None:
        subclass = _gated_class(original)
        _gated_classes[original] = weakref.ref(subclass)
    module.__class__ = subclass


def ungate_model(module: nn.Module) -> None:
    """Give ``module`` its own class back. Called inside the gate, by the thread that closes the receiver."""
    original = vars(type(module)).get(_ORIGINAL)
    if original is not None:
        module.__class__ = original


def _new(cls: type, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Return an empty instance, for unpickling."""
    return cls.__new__(cls, *arguments, **keywords)


def _gated_class(original: type[nn.Module]) -> type[nn.Module]:
    inner = original.__call__

    @functools.wraps(inner)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _gate.gate_state.call_model(inner, self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        function, arguments, *rest = original.__reduce_ex__(self, protocol)
        # With one of these two functions, pickle checks that the class is the object's own; with `_new` it does not.
        if function is copyreg.__newobj__:  # pyright: ignore[reportAttributeAccessIssue]
            function, arguments = _new, (arguments[0], arguments[1:], {})
        elif function is copyreg.__newobj_ex__:  # pyright: ignore[reportAttributeAccessIssue]
            function = _new
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
    gated = metaclass(original.__name__, (nn.Module,), namespace)
    try:
        # Set afterwards, so that the user's `__init_subclass__` is not called: it may keep a list of subclasses.
        gated.__bases__ = (original,)
    except TypeError:  # original has another layout in memory (`__slots__`)
        return metaclass(original.__name__, (original,), namespace)
    return gated
