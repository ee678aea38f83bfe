"""The lock around every forward of a synchronised model, and the hooks that are called before and after it."""

from __future__ import annotations

from typing import Any, Protocol


class GateHook(Protocol):
    """What the gate calls before and after each forward: the object that installs one model's updates.

    Implemented by ``ModelUpdater``, ``WorkerSlot``, ``InstallOnRequest`` (installs only when the worker requests it),
    ``RegisteredBinder`` and ``MixedWeightsGuard``.
    """

    def poll_update(self) -> bool:
        """Install the newest version before a forward.

        Called each time a thread enters the gate from outside, with the lock held: by the acting thread before each
        forward, by the receiver thread after a message. Returns True if ``poll_update`` of every hook has to be called
        again: the version belonged to a transaction (``wsync.synchronize``), so that updates of other models were
        installed with it; or the install has failed. An exception is raised in the caller of the forward.
        """
        ...

    def leaving_gate(self) -> None:
        """Release what the forward used, if one ran. Called when a thread leaves the gate to the outside, lock held.

        Also if ``poll_update`` has raised, and if the thread only passed through the gate to install an update. An
        exception is raised in the caller of the forward, after the other hooks were called.
        """
        ...


class GateState:
    """The gate's lock and hooks. One per process; used by every thread that runs a forward, and the receiver thread.

    Args:
        lock: a ``threading.RLock``.

    Attributes:
        lock: as given.
        depth: how often the thread that has the lock has entered; 0 if no thread is inside.
        hooks: called in this order; the tuple is replaced as a whole, by a thread that has the lock.
        subject: the model that was called, if its forward has entered the gate from outside; otherwise None.
    """

    def __init__(self, lock: Any, /) -> None:
        # `with lock` is atomic towards signals; the depth is restored, not counted down. So the gate opens again
        # whatever a forward raised, and wherever a KeyboardInterrupt came.
        self.lock = lock
        self.depth = 0
        self.hooks: tuple[GateHook, ...] = ()
        self.subject: object = None

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, called inside the gate."""
        with self.lock:
            depth = self.depth
            try:
                self.enter(depth)
                return function(*args, **kwargs)
            finally:
                self.depth = depth  # not in a function: a signal handler may run where a Python function begins
                self.leave(depth)

    def call_model(self, function: Any, model: object, /, *args: Any, **kwargs: Any) -> Any:
        """Return ``function(model, *args, **kwargs)``, called inside the gate as a forward of ``model``."""
        with self.lock:
            depth, before = self.depth, self.subject
            try:
                self.subject = before if depth else model
                self.enter(depth)
                return function(model, *args, **kwargs)
            finally:
                self.depth = depth
                try:
                    self.leave(depth)
                finally:
                    self.subject = before

    def enter(self, depth: int, /) -> None:
        """Enter the gate; from outside (``depth`` is 0), call ``poll_update`` of all hooks.

        Called with the lock held; ``depth`` is the attribute's value. Afterwards, also if this raises, the caller must
        set the attribute back to that value, and then call ``leave`` with it.
        """
        self.depth = depth + 1
        if depth == 0:
            # The transaction that one hook installs changes the models of others: all hooks are called again.
            while any([hook.poll_update() for hook in self.hooks]):
                pass

    def leave(self, depth: int, /) -> None:
        """Leave the gate; to the outside (``depth`` is 0), call ``leaving_gate`` of all hooks: see ``enter``."""
        self.depth = depth
        if depth == 0:
            self._leave_hooks(self.hooks)

    def _leave_hooks(self, hooks: tuple[GateHook, ...]) -> None:
        for index, hook in enumerate(hooks):
            try:
                hook.leaving_gate()
            except BaseException:
                self._leave_hooks(hooks[index + 1 :])
                raise
