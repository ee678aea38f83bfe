"""The gate: no model changes while its forward runs.

There is one gate per process, a re-entrant lock, for all synchronised models in it. A forward of a gated model holds
it, and so does a call of any public method that its class defines; what is said here of forwards holds for these, too.
Each receiver is a *hook* of the gate. When a thread enters the gate from outside, each hook installs what has
arrived; so a forward sees one version from its first layer to its last. When the thread leaves, each hook releases what
the forward has used (a slot of shared memory).

The control thread, which brings updates, never waits for the gate: it only tries the lock (``settle``). If another
thread holds it, that thread looks once more after it has left. So an update is installed as soon as the running forward
ends, even if no other forward follows.

What bypasses the gate, such as a single layer called on its own, or a plain read of a parameter (docs/lifecycle.md has
all), may see two versions. Hold the gate for it, and around forward *and* backward::

    with wsync.gate():
        loss = model(x).sum()
        loss.backward()
"""

from __future__ import annotations

import asyncio
import copyreg
import functools
import gc
import inspect
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, ParamSpec, Protocol, TypeVar

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.jit import ScriptModule

from wsync.deadlines import remaining

P = ParamSpec("P")
R = TypeVar("R")
NO_FORWARD = object()


class GateHook(Protocol):
    """What the gate calls, inside it: a receiver, or its compiled part."""

    def poll_update(self) -> bool:
        """Install what the next forward has to use; return whether all hooks have to be called again."""
        ...

    def leaving_gate(self, forward: bool) -> None:
        """Release what was used. ``forward``: a forward may have used the model; else something was only installed."""


class Gate:
    """The gate of one process."""

    def __init__(self) -> None:
        self.hooks: tuple[GateHook, ...] = ()
        # Inside the gate, the model that was called from outside; None for ``gate()`` and ``gated()``; ``NO_FORWARD``
        # for a thread that only installs: hooks raise no errors that are meant for a forward.
        self.subject: object = None
        self._lock = threading.RLock()  # guards the models of this process, and all attributes here
        self._depth = 0  # above 0 while a thread is inside: the nesting of `hold`
        self._wanted = False  # something has arrived: it is looked for when the gate is left
        self._jobs: deque[Callable[[], object]] = deque()
        self._task: object = None  # the asyncio task that holds the gate by `hold`
        self._owned: Callable[[], bool] = self._lock._is_owned  # pyright: ignore[reportAttributeAccessIssue]

    def call_model(self, model: object, function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Call ``function`` inside the gate, as a forward of ``model`` (None: of any model)."""
        try:
            with self._lock:
                if self._depth:
                    return function(*args, **kwargs)
                self.subject, self._depth = model, 1
                try:
                    for hook in self.hooks:
                        if hook.poll_update():
                            self._poll()
                    return function(*args, **kwargs)
                finally:
                    self._depth = 0
                    for hook in self.hooks:
                        hook.leaving_gate(model is not NO_FORWARD)
                    self.subject = None
        finally:
            if self._wanted:
                self.settle()

    def call_without_forward(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function``, which runs no forward, inside the gate."""
        return self.call_model(NO_FORWARD, function, args, kwargs)

    def install(self) -> None:
        """Install what has arrived; waits for a forward that is running."""
        self.call_model(NO_FORWARD, bool, (), {})

    def call_before(self, deadline: float | None, function: Callable[[], R]) -> R | None:
        """As ``call_without_forward``; None if another thread holds the gate until the deadline has passed.

        Called outside the gate.
        """
        left = remaining(deadline)
        try:
            return self._try(-1 if left is None else left, function)
        finally:
            if self._wanted:
                self.settle()

    def _try(self, seconds: float, function: Callable[[], R]) -> R | None:
        locked = False
        try:
            locked = self._lock.acquire(timeout=seconds)
            if not locked:
                return None
            self._wanted = bool(self._jobs)
            return self.call_without_forward(function)
        finally:
            if locked or self._owned():  # a signal handler may have raised before the assignment
                self._lock.release()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the gate; RuntimeError: another asyncio task of this thread holds it across an ``await``."""
        try:
            with self._lock:
                depth, task = self._depth, _current_task()
                if depth and self._task is not None and task is not self._task:
                    raise RuntimeError("wsync.gate() is held across an await by another task of this thread")
                if not depth:
                    self.subject, self._task = None, task
                self._depth = depth + 1
                try:
                    if not depth:
                        self._poll()
                    yield
                finally:
                    self._depth = depth
                    if not depth:
                        self._task = self.subject = None
                        for hook in self.hooks:
                            hook.leaving_gate(True)
        finally:
            if self._wanted:
                self.settle()

    def _poll(self) -> None:
        while any([hook.poll_update() for hook in self.hooks]):
            pass

    def settle(self) -> bool:
        """Install what has arrived, if no thread holds the gate; else its holder does so on leaving. Never waits.

        Returns whether that was done.
        """
        self._wanted = True
        while self._wanted and not self._owned() and self._try(0, self._run_jobs):
            pass
        return not self._wanted

    def soon(self, job: Callable[[], object]) -> None:
        """Have ``job`` called inside the gate, now or by the thread that holds it. It must raise nothing."""
        self._jobs.append(job)
        self.settle()

    def _run_jobs(self) -> bool:
        while self._jobs:
            self._jobs.popleft()()
        return True

    @property
    def held_here(self) -> bool:
        """Whether the calling thread is inside the gate."""
        return self._owned() and self._depth > 0

    def attach(self, hook: GateHook) -> None:
        """Call ``hook`` from now on, after those that are attached already."""
        with self._lock:
            self.hooks = (*self.hooks, hook)

    def detach(self, hook: GateHook) -> None:
        """Stop calling ``hook``."""
        with self._lock:
            self.hooks = tuple(other for other in self.hooks if other is not hook)


def _current_task() -> object:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


_gate = Gate()


def entered_for_forward_of(model: object) -> bool:
    """Return whether the gate was entered for a forward that may use ``model``, or by ``gate()`` or ``gated()``.

    A forward may use the parameters of models inside its own, and around it.
    """
    subject = _gate.subject
    if subject is None or subject is model:
        return True
    if not (isinstance(subject, nn.Module) and isinstance(model, nn.Module)):
        return False
    return any(one is model for one in subject.modules()) or any(one is subject for one in model.modules())


def _in_child() -> None:
    """Start anew: a child has no receivers, and the lock may be held by a thread that does not exist in the child."""
    global _gate
    _gate = Gate()


os.register_at_fork(after_in_child=_in_child)


def process_gate() -> Gate:
    """Return the gate of this process."""
    return _gate


def gate() -> Any:
    """Return a context manager that keeps each synchronised model of this process at its version while it is open.

    Re-entrant: forwards inside it install nothing. An update that arrives meanwhile is installed after it.
    """
    return _gate.hold()


def gated(function: Callable[P, R], model: nn.Module | None = None) -> Callable[P, R]:
    """Return a function that calls ``function`` inside ``gate()``; faster than ``with gate()``.

    With a ``model``, the call is a forward of it: that a model outside it cannot be used raises no error.
    TypeError: a call of ``function`` only makes a coroutine or a generator, which would run later.
    """
    if _runs_later(function):
        raise TypeError(f"gated() takes functions that run when they are called: use gate() inside {function!r}")

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        return _gate.call_model(model, function, args, kwargs)

    return inside


def _runs_later(function: object) -> bool:
    tests = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return any(test(function) for test in tests)


# --- gating a model ---

_ORIGINAL = "_wsync_original"  # attribute of a gated class: the class that it was made from
_PART = "_compiled_call_impl"  # what PyTorch calls in place of ``_call_impl``; it is in no copy and no pickle
# Each class that has been gated → its gated subclass, by the methods that are gated.
_gated_classes: weakref.WeakKeyDictionary[type, dict[Any, weakref.ref[type[nn.Module]]]] = weakref.WeakKeyDictionary()


def gate_model(module: nn.Module, methods: Collection[str] | None = None) -> None:
    """Make calls of ``module``, of its public methods, and of its parts pass through the gate.

    The methods are those that its class and the bases below ``nn.Module`` define, or only the given ones. The class is
    replaced by a subclass of the same name. A part is a submodule that has submodules itself. A copy or unpickled
    module is not gated (except a copy that the module's own ``__deepcopy__`` makes by ``type(self)``). Called inside
    the gate.

    TypeError: its ``forward`` is a generator or a coroutine, which would run through several versions; or it is a
    TorchScript module. AttributeError: it has no method of a given name.
    """
    original = type(module)
    if _ORIGINAL in vars(original):
        return
    if isinstance(module, ScriptModule):
        raise TypeError("a TorchScript module cannot be gated: synchronise the module that it was made from")
    if _runs_later(original.forward):
        raise TypeError(f"{original.__name__}.forward runs later than it is called: use wsync.gate() inside it")
    names = None if methods is None else frozenset(methods)
    made = _gated_classes.setdefault(original, {})
    reference = made.get(names)
    subclass = None if reference is None else reference()
    if subclass is None:
        subclass = _gated_class(original, names)
        made[names] = weakref.ref(subclass)
    module.__class__ = subclass
    for taken in gc.get_referrers(module):
        own = vars(subclass).get(taken.__name__) if isinstance(taken, MethodType) else None
        if own is not None and taken.__self__ is module and taken.__func__ is not own:
            warnings.warn(
                f"{original.__name__}.{taken.__name__} was taken or compiled before init_on_receiver() and connect(): "
                "such a method goes around the gate, and sees weights of several versions. Take it after connect()",
                stacklevel=2,
            )
    for part in module.modules():
        if part is not module and next(part.children(), None) is not None and _ORIGINAL not in vars(type(part)):
            call = part._compiled_call_impl or part._call_impl
            vars(part)[_PART] = partial(_call_part, part, call)


def ungate_model(module: nn.Module) -> None:
    """Give ``module`` its own class back, and its parts their calls. Called inside the gate."""
    original = vars(type(module)).get(_ORIGINAL)
    if original is not None:
        module.__class__ = original
    for part in module.modules():
        entry = vars(part).get(_PART)
        if isinstance(entry, partial) and entry.func is _call_part:
            del vars(part)[_PART]
            if entry.args[1] != part._call_impl:  # the user has compiled it
                vars(part)[_PART] = entry.args[1]


def _call_part(part: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _gate._depth and is_dynamo_compiling():  # a part of a model that is compiled: its graph has no lock
        return call(*args, **kwargs)
    return _gate.call_model(part, call, args, kwargs)


def _new(cls: type, *arguments: Any) -> Any:
    """Return an empty instance, for unpickling."""
    return cls.__new__(cls, *arguments)


def _entering(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that enters the gate; or, if it runs later than it is called, that has to be called inside."""
    runs_later = _runs_later(method)
    if runs_later and name in vars(nn.Module):  # PyTorch calls it: ``named_parameters``, …
        return method

    @functools.wraps(method)
    def enter(*args: Any, **kwargs: Any) -> Any:  # the module is the first
        if _gate._depth and (is_dynamo_compiling() or _gate._owned()):  # called by a forward, perhaps a compiled one
            return method(*args, **kwargs)
        if not runs_later:
            return _gate.call_model(args[0], method, args, kwargs)
        if not _gate.held_here:
            owner = type(args[0]).__name__
            raise RuntimeError(f"{owner}.{name}() runs later than it is called: use it in wsync.gate()")
        return method(*args, **kwargs)

    return enter


def _gated_class(original: type[nn.Module], chosen: frozenset[str] | None) -> type[nn.Module]:
    inner = original.__call__

    @functools.wraps(inner)
    def __call__(*args: Any, **kwargs: Any) -> Any:  # the module is the first
        return _gate.call_model(args[0], inner, args, kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        function, arguments, *rest = original.__reduce_ex__(self, protocol)
        if function is copyreg.__newobj__:  # pyright: ignore[reportAttributeAccessIssue]
            function = _new  # with the other, pickle checks that the class is the object's own
        return (function, tuple(original if item is type(self) else item for item in arguments), *rest)

    own = original.__mro__[: original.__mro__.index(nn.Module)]
    methods = {name: value for base in reversed(own) for name, value in vars(base).items() if inspect.isfunction(value)}
    names = {name for name in methods if name[0] != "_"} if chosen is None else chosen
    if unknown := names - methods.keys():
        raise AttributeError(f"gate= names methods of the model, and {original.__name__} has no {sorted(unknown)}")
    namespace: dict[str, Any] = {
        **{name: _entering(name, methods[name]) for name in names},
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
