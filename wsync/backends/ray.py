"""Ray: actors coordinate; shared memory carries on one machine, ``torch.distributed`` between several.

The sender drives both ends of any actor that it is given: it has the actor join by a call through Ray. Updates are then
announced over a connection of their own, and installed beside whatever the actor does. A Ray call for each update would
queue behind a rollout, or need a concurrency group that the actor's class declares.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from wsync.backends.distributed import GroupScheme
from wsync.control.processes import Process, Processes
from wsync.control.rendezvous import SocketRendezvous
from wsync.errors import NotConnected, WeightSyncError, WorkerFailed, missing_extra
from wsync.media.group import DistributedTransport
from wsync.options import single_count
from wsync.scheme import WeightSyncScheme
from wsync.sender import one_worker

if TYPE_CHECKING:  # Ray is imported when a scheme is initialised on a sender: most programs do without
    from ray import ObjectRef
    from ray.actor import ActorHandle

_GRACE = 5.0  # seconds to wait for Ray to report the calls as finished; calls of busy actors may finish later
_joined: dict[tuple[str, int], WeightSyncScheme] = {}  # in an actor: by the sender's address and the worker's index


class RayTransport(DistributedTransport):
    """Weights through ``torch.distributed``, to one actor.

    Args:
        remote_actor: the actor's handle, for reference.
        worker_idx: its worker index.
        options: as for ``DistributedTransport``.
    """

    def __init__(
        self, *, remote_actor: ActorHandle | None = None, worker_idx: int | None = None, **options: Any
    ) -> None:
        super().__init__(**({} if worker_idx is None else {"worker": worker_idx}), **options)
        self.remote_actor = remote_actor


class RayWeightSyncScheme(GroupScheme):
    """Weight synchronization to Ray actors.

    Given actors (``init_on_sender(..., actors=[…])``), the sender alone drives both ends: ``connect()`` has each actor
    find the model in itself, at the path ``model_id``, and join. Otherwise each actor calls ``init_on_receiver`` and
    ``connect`` on the scheme that it was sent.

    Args:
        backend, checksum, shared_memory, inline_bytes: as in ``DistributedWeightSyncScheme``.
        host: the sender's address, by which actors reach it; loopback by default. ``"node"`` is this node's address in
            the Ray cluster.
        strategy, sync, timeout, bind, options: as in ``WeightSyncScheme``.
    """

    name = "ray"
    collectors: ClassVar[tuple[str, ...]] = ("ray", "ray_async", "single")
    transport_class = RayTransport

    _actors: Actors | None = None

    def create_rendezvous(self) -> SocketRendezvous:
        """Return how actors find the sender."""
        if self.host != "node":
            return SocketRendezvous(self.host)
        from ray.util import get_node_ip_address

        return SocketRendezvous(get_node_ip_address())

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        actors: Sequence[ActorHandle] | None = None,
        **given: Any,
    ) -> None:
        """Set up the trainer's end, as ``WeightSyncScheme.init_on_sender`` does.

        Args:
            model_id: the model's name, and its path in each actor.
            context: a collector; or an object with ``actors``.
            actors: those that the sender has join, by worker index.
            given: as there.

        Raises:
            NotConnected: Ray is not initialised.
        """
        try:
            import ray
        except ModuleNotFoundError as error:
            raise missing_extra(error, "ray") from error
        if not ray.is_initialized():
            raise NotConnected(
                "Ray is not initialised: call ray.init(), or ray.init(address=…), before init_on_sender()"
            )
        actors = getattr(context, "actors", None) if actors is None else actors
        if actors is not None:
            given["num_workers"] = single_count({"num_workers": given.get("num_workers"), "actors": len(actors)})
        super().init_on_sender(model_id, context, **given)
        self._actors = Actors(actors) if actors else None

    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, processes: Processes | None = None
    ) -> None:
        """Connect, as ``WeightSyncScheme.connect`` does. Actors that have not joined are called to join.

        Raises:
            NotConnected: as there; or ``ray.shutdown`` was called since.
            WorkerFailed: an actor could not join; with its own error.
            ValueError: ``processes``, with actors: Ray reports the end of one.
            Exception: else as there.
        """
        if self._actors is None or self._sender is None:
            super().connect(worker_idx=worker_idx, weights=weights, processes=processes)
            return
        if processes is not None:
            raise ValueError("Ray reports the end of its actors: leave processes= out")
        present = self.sender.outlet.workers
        missing = [worker for worker in range(self.num_workers) if worker not in present]
        with self._joining(missing) as sentinels:
            super().connect(worker_idx=worker_idx, weights=weights, processes=sentinels)

    def readmit(self, worker_idx: int, process: Process | None = None, timeout: float | None = None) -> None:
        """Accept a worker in the place of one that has died, as ``WeightSyncScheme.readmit`` does.

        An actor that the sender was given, and that Ray has restarted (``max_restarts``), is called to join. An actor
        that is alive joins again with the model that it has at the path now.

        Raises:
            WorkerFailed: it could not; with its own error.
            ValueError: there is no such worker; or ``process``, with actors: Ray reports the end of one.
        """
        if self._actors is None:
            super().readmit(worker_idx, process, timeout)
            return
        if process is not None:
            raise ValueError("Ray reports the end of its actors: leave process= out")
        worker_idx = one_worker(worker_idx, self.num_workers)
        with self._joining([worker_idx]) as sentinels:
            super().readmit(worker_idx, sentinels[worker_idx], timeout)

    def _joining(self, workers: Sequence[int]) -> AbstractContextManager[Mapping[int, int]]:
        """Call actors to join, as ``_watched``. Those that are not called for a second time are disconnected first.

        An actor's call ends its old connection, which must not be accepted as the new one.
        """
        sender, actors = self.sender, self._actors
        assert actors is not None

        def begin(worker: int) -> None:
            with sender.exclusive():  # another thread's send ends first
                sender.disconnect(worker)

        args = (self, self.model_id)
        return _watched({one: actors.join(one, partial(begin, one), *args, one) for one in workers})

    def shutdown(self) -> None:
        """Release everything, also in the actors that the sender had join."""
        actors = None if self._inherited else self._actors  # they are the parent's
        key = _key(self) if actors is not None and self._address is not None else ""
        super().shutdown()
        if actors is not None:
            actors.leave(key)
        self._actors = None  # last: after Ctrl-C another call does the rest

    def __getstate__(self) -> dict[str, Any]:
        """Return the options and the sender's address."""
        return {**super().__getstate__(), "_actors": None}


# --- in an actor ---


def _join(instance: Any, scheme: RayWeightSyncScheme, model_id: str, worker_idx: int) -> None:
    """Connect to the sender, which has closed the last connection; first leave that, and dead senders."""
    key = _key(scheme)
    for known, joined in [*_joined.items()]:
        receiver = joined._receiver  # None while another thread has the scheme leave
        if known == (key, worker_idx) or receiver is None or not receiver.connected:
            _leave(instance, *known)
    scheme.init_on_receiver(model_id, context=instance, worker_idx=worker_idx)
    scheme.connect()
    _joined[key, worker_idx] = scheme


def _leave(instance: Any, key: str, worker_idx: int) -> None:
    """Disconnect from the sender; the model keeps its weights."""
    if (scheme := _joined.pop((key, worker_idx), None)) is not None:
        scheme.shutdown()


def _key(scheme: RayWeightSyncScheme) -> str:
    return scheme._address.unix


# --- calls to actors ---


class Actors:
    """Actors by worker index. A handle is valid only in the ``ray.init()`` session in which it was created."""

    def __init__(self, handles: Sequence[ActorHandle]) -> None:
        self._handles = list(handles)
        self._connection = _connection()
        self._joins: dict[int, ObjectRef] = {}  # by worker, the last call to join

    def join(self, worker: int, begin: Callable[[], None], *args: Any) -> ObjectRef:
        """Have an actor join, after ``begin()``; or return its last call to join, if Ray has not run that yet.

        Raises:
            NotConnected: Ray was shut down meanwhile. (A call would start another Ray.)
        """
        import ray

        if self._connection != _connection():
            raise NotConnected(
                f"ray.shutdown() was called, and has ended the connection to the {len(self._handles)} actor(s) of this "
                "scheme: give new actors to a new scheme"
            )
        last = self._joins.get(worker)
        if last is None or ray.wait([last], timeout=0)[0]:
            begin()
            # With retries Ray takes the call also while it restarts the actor (``max_restarts``).
            call = self._handles[worker].__ray_call__.options(max_task_retries=-1)
            last = self._joins[worker] = call.remote(_join, *args)
        return last

    def leave(self, key: str) -> None:
        """Have all actors leave, and wait until Ray reports that they have, or are dead, but not for long."""
        import ray

        if self._connection == _connection():
            calls: list[Any] = [
                one.__ray_call__.remote(_leave, key, worker) for worker, one in enumerate(self._handles)
            ]
            ray.wait(calls, num_returns=len(calls), timeout=_GRACE)


def _connection() -> tuple[str, str] | None:
    """Return which connection to Ray this process has; None for none."""
    import ray

    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


@contextmanager
def _watched(refs: Mapping[int, ObjectRef]) -> Iterator[Mapping[int, int]]:
    """Yield, per worker, a descriptor that becomes readable if its call fails. At the end, raise the calls' own errors.

    Raises:
        WorkerFailed: calls have failed; also in place of an error in the block.
    """
    lock, ends = threading.Lock(), {worker: ref.future() for worker, ref in refs.items()}
    sentinels = {worker: os.eventfd(0, os.EFD_CLOEXEC) for worker in refs}

    def done(worker: int, end: Future[None]) -> None:  # called by a thread of Ray
        with lock:
            if end.exception() is not None and worker in sentinels:
                os.eventfd_write(sentinels[worker], 1)

    def raise_failures() -> None:
        causes = {worker: end.exception() for worker, end in sorted(ends.items()) if end.done()}
        errors = {worker: str(cause) for worker, cause in causes.items() if cause is not None}
        if errors:
            lines = "\n".join(f"worker {worker}: {cause}" for worker, cause in errors.items())
            raise WorkerFailed(f"{len(errors)} actor(s) could not join:\n{lines}", errors)

    for worker, end in ends.items():
        end.add_done_callback(partial(done, worker))
    try:
        yield sentinels
        # Until Ray knows that they are finished: it repeats a call if the actor dies before.
        wait(ends.values(), _GRACE)
        raise_failures()
    except WeightSyncError:
        raise_failures()
        raise
    finally:
        with lock:
            descriptors = [*sentinels.values()]
            sentinels.clear()
        for descriptor in descriptors:
            os.close(descriptor)
