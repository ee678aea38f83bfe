"""The control thread: the one thread of a process that has connections, deadlines and deaths of other processes.

It runs an asyncio loop. A public call of the library hands it a coroutine and waits for the result. Python runs signal
handlers in the main thread, so Ctrl-C ends that wait, and never meets a connection in the middle of a change: what the
coroutine does goes on.

This file is the only one that knows of threads and forks. A forked child has none of its parent's threads: there,
``ControlLoop.inherited`` is true of the parent's loop, every call raises, and ``control_loop()`` returns a new one.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from wsync.deadlines import remaining
from wsync.errors import NotConnected, system_call

try:
    from uvloop import new_event_loop as _new_loop
except ModuleNotFoundError:  # an extra: the loop of the standard library takes half as long again for a small update
    from asyncio import new_event_loop as _new_loop

P = ParamSpec("P")
T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a loop; uvloop's needs calls that a container may block, and the one of the standard library does not."""
    try:
        return _new_loop()
    except OSError:
        with system_call("epoll_create(2)", "connections"):
            return asyncio.new_event_loop()


class ControlLoop:
    """The control thread of one process. It runs while an end of a connection has acquired it."""

    def __init__(self) -> None:
        self.inherited = False  # whether this process is a forked child of the one that made it
        self._lock = threading.RLock()  # guards the three below; a finalizer may come in between
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def acquire(self) -> ControlLoop:
        """Have the thread run until ``release`` is called as often; return this object."""
        self.require_own()
        with self._lock:
            if self._loop is None:
                self._loop = new_event_loop()
                self._thread = threading.Thread(target=self._run, args=[self._loop], name="wsync-control", daemon=True)
                self._thread.start()
            self._users += 1
        return self

    def release(self) -> None:
        """Undo one ``acquire``; the last one ends the thread."""
        if self.inherited:
            return
        with self._lock:
            self._users -= 1
            if self._users:
                return
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join()

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        loop.run_until_complete(asyncio.sleep(0))  # transports that were closed close their sockets now
        loop.close()

    def require_own(self) -> None:
        """Raise NotConnected in a forked child of the process that made this object."""
        if self.inherited:
            made = "its parent has initialised this scheme: make a scheme of its own here"
            raise NotConnected(f"this process is a forked child, and {made}")

    @property
    def here(self) -> bool:
        """Whether the calling thread is the control thread."""
        return self._thread is threading.current_thread()

    def call(self, coroutine: Coroutine[Any, Any, T], deadline: float | None = None) -> T:
        """Run a coroutine in the control thread, and wait for its result until a deadline.

        The coroutine goes on if the deadline (TimeoutError), or an exception such as Ctrl-C, ends the wait.
        RuntimeError: called by the control thread, which would wait for itself.
        """
        if self.here:
            coroutine.close()
            raise RuntimeError("a blocking call in the control thread: call it from a thread of your own")
        # Its wait leaves no lock behind if a signal handler raises.
        answers = queue.SimpleQueue[tuple[BaseException | None, asyncio.Task[T]]]()

        def begin() -> None:
            asyncio.ensure_future(coroutine).add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            ended = NotConnected("this end was shut down by another thread") if task.cancelled() else task.exception()
            answers.put((ended, task))

        self.post(begin)
        try:
            error, task = answers.get(timeout=remaining(deadline))
        except queue.Empty:
            raise TimeoutError from None
        if error is not None:
            raise error
        return task.result()

    def post(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function in the control thread, soon. NotConnected: in a forked child; or the thread has ended."""
        self.require_own()
        with self._lock:  # what is posted comes before the end of the loop
            if self._loop is None:
                raise NotConnected("this end was shut down")
            call = self._loop.call_soon if self.here else self._loop.call_soon_threadsafe
            call(partial(function, *args, **kwargs))


class BlockingCalls:
    """A thread that makes calls that block, one after the other, for the control thread, which awaits their results.

    It starts with the first call. A call that never returns keeps it, but not the process.
    """

    def __init__(self, name: str) -> None:
        self._name = f"wsync-{name}"
        self._calls = queue.SimpleQueue[Any]()
        self._thread: threading.Thread | None = None

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Have a function called; return the future of its result."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((result, partial(function, *args, **kwargs)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return result

    def end(self) -> None:
        """End the thread, once it is idle."""
        self._calls.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, after ``end``; without a timeout if no call is running."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            result, function = call
            answer = error = None
            if not result.cancelled():
                try:
                    answer = function()
                except BaseException as raised:  # noqa: BLE001  raised again where it is awaited
                    # As they are, the others would end the loop.
                    plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                    error = raised if plain else RuntimeError(f"{type(raised).__name__}: {raised}")
            with suppress(RuntimeError):  # the loop has ended
                result.get_loop().call_soon_threadsafe(_settle, result, answer, error)
            del call, result, function, answer, error  # not kept until the next call: they may have a buffer


def _settle(future: asyncio.Future[Any], answer: object, error: Exception | None) -> None:
    if future.done():  # its waiter was cancelled
        return
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)


async def run_blocking(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that blocks in a thread of its own, and await its result.

    If the caller is cancelled, a call that has begun goes on to the function's end, and its result is dropped.
    """
    calls = BlockingCalls(name)
    future = calls.start(function, *args, **kwargs)
    calls.end()
    try:
        return await future
    finally:
        if future.done() and not future.cancelled():
            calls.join()  # it has nothing left to do


_current = ControlLoop()
_inherited: list[ControlLoop] = []  # kept in a forked child: closing one would change the parent's epoll


def control_loop() -> ControlLoop:
    """Return this process's control loop."""
    return _current


def _in_child() -> None:
    global _current
    _current.inherited = True
    _inherited.append(_current)
    _current = ControlLoop()


os.register_at_fork(after_in_child=_in_child)
