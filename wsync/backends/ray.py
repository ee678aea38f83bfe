"""Ray: the sender has actors join by a call through Ray; updates then travel as by ``distributed``.

A Ray call for each update would queue behind a rollout, or need a concurrency group that the actor's class declares.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from wsync.backends.distributed import GroupScheme
from wsync.control.processes import Process, Processes
from wsync.control.rendezvous import Rendezvous
from wsync.errors import NotConnected, WeightSyncError, missing_extra
from wsync.scheme import WeightSyncScheme
from wsync.sender import one_worker
from wsync.update import Cause
from wsync.workers import raise_causes

if TYPE_CHECKING:  # Ray is imported when a scheme is initialised on a sender: most programs do without
    from ray import ObjectRef
    from ray.actor import ActorHandle

_GRACE = 5.0  # seconds to wait for Ray to report the calls as finished; calls of busy actors may finish later
_joined: dict[tuple[str, int], WeightSyncScheme] = {}  # in an actor: by the sender's address and the worker's index


class RayWeightSyncScheme(GroupScheme):
    """Weight synchronization to Ray actors.

    Given ``actors``, the sender alone drives both ends: ``connect()`` has each actor find the model in itself, at the
    path ``model_id``, and join. Otherwise each actor calls ``init_on_receiver`` and ``connect``.

    Args:
        backend, shared_memory, inline_bytes: as in ``DistributedWeightSyncScheme``.
        host: the sender's address, by which actors reach it; loopback by default. ``"node"`` is this node's address in
            the Ray cluster.
        strategy, options: as in ``WeightSyncScheme``.
    """

    name = "ray"
    collectors: ClassVar[tuple[str, ...]] = ("ray", "ray_async", "single")

    _actors: Sequence[ActorHandle] = ()  # that the sender has join, by worker
    _joins: Mapping[int, ObjectRef] = {}  # by worker, the last call to join
    _job = ""  # the one of Ray's that the actors belong to

    def create_rendezvous(self) -> Rendezvous:
        if self.host != "node":
            return super().create_rendezvous()
        from ray.util import get_node_ip_address

        return Rendezvous(get_node_ip_address())

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        actors: Sequence[ActorHandle] | None = None,
        **given: Any,
    ) -> None:
        """``actors``, also of the context, are those that the sender has join. NotConnected: Ray is not initialised."""
        self._require_uninitialised()
        self._job = _job()
        if not self._job:
            raise NotConnected("Ray is not initialised: call ray.init(…) before init_on_sender()")
        self._actors, self._joins = [*(getattr(context, "actors", ()) if actors is None else actors)], {}
        super().init_on_sender(model_id, context, **given)

    def implied_worker_counts(self) -> Mapping[str, int]:
        return {"actors": len(self._actors)} if self._actors else {}

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        processes: Processes | None = None,
        wait: bool = True,
    ) -> None:
        """Connect; actors that have not joined are called to join.

        WorkerFailed: an actor could not, with its own error. NotConnected: ``ray.shutdown`` was called since.
        """
        if not self._actors or not wait:
            return super().connect(worker_idx=worker_idx, weights=weights, processes=processes, wait=wait)
        if processes is not None:
            raise ValueError("Ray reports the end of its actors: leave processes= out")
        present = self.sender.outlet.workers
        with self._joining([worker for worker in range(self.num_workers) if worker not in present]) as sentinels:
            super().connect(worker_idx=worker_idx, weights=weights, processes=sentinels)

    def readmit(self, worker_idx: int, process: Process | None = None, timeout: float | None = None) -> None:
        """An actor that is alive, or that Ray has restarted, is called to join with the model that it has now."""
        if not self._actors:
            return super().readmit(worker_idx, process, timeout)
        if process is not None:
            raise ValueError("Ray reports the end of its actors: leave process= out")
        worker_idx = one_worker(worker_idx, self.num_workers)
        with self._joining([worker_idx]) as sentinels:
            super().readmit(worker_idx, sentinels[worker_idx], timeout)

    @contextmanager
    def _joining(self, workers: Sequence[int]) -> Iterator[Mapping[int, int]]:
        """Call actors to join; yield, per worker, a descriptor that becomes readable if its call fails.

        At the end, raise the actors' own errors as ``WorkerFailed``, also in place of an error in the block.
        """
        if self._job != _job():  # a call would start another Ray
            raise NotConnected("ray.shutdown() was called: the actors of this scheme are gone")
        ends = {worker: self._join_of(worker).future() for worker in workers}
        with ExitStack() as opened:
            sentinels: dict[int, int] = {}
            for worker, end in ends.items():
                reader, writer = (opened.enter_context(one) for one in socket.socketpair())
                sentinels[worker] = reader.fileno()
                end.add_done_callback(lambda end, writer=writer: end.exception() and writer.close())  # a thread of Ray
            try:
                yield sentinels
                wait(ends.values(), _GRACE)  # until Ray knows that they are finished: it repeats a call of a dead actor
            except WeightSyncError:
                _raise_failures(ends)
                raise
            _raise_failures(ends)

    def _join_of(self, worker: int) -> ObjectRef:
        """Call an actor to join, unless Ray has not run the last such call yet.

        The call ends the actor's old connection, which must not be accepted as the new one: it is disconnected first.
        """
        import ray

        if worker not in self._joins or ray.wait([self._joins[worker]], timeout=0)[0]:
            with self.sender.exclusive():  # another thread's send ends first
                self.sender.disconnect(worker)
            # With retries Ray takes the call also while it restarts the actor (``max_restarts``).
            call = self._actors[worker].__ray_call__.options(max_task_retries=-1)
            self._joins = {**self._joins, worker: call.remote(_join, self, self.model_id, worker)}
        return self._joins[worker]

    def shutdown(self) -> None:
        """Release everything, also in the actors that the sender had join."""
        actors = () if self._inherited else self._actors  # they are the parent's
        key = self._address.unix if actors and self._address is not None else ""
        super().shutdown()
        if actors and self._job == _job():
            import ray

            calls: list[Any] = [one.__ray_call__.remote(_leave, key, worker) for worker, one in enumerate(actors)]
            ray.wait(calls, num_returns=len(calls), timeout=_GRACE)
        self._actors, self._joins = (), {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_actors": (), "_joins": {}}


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Weight synchronization to a module inside a ``RayModuleTransform``, an environment transform in a Ray actor.

    The sender drives both ends: it is initialised with the transform (``context=transform``) or its actors, and
    ``connect()`` is called on the sender alone; a collector does both, for the transform at the path
    ``"env.transform[0].module"``.
    """

    name = "ray_module_transform"
    collectors: ClassVar[tuple[str, ...]] = ()  # for a module in an environment, not for a policy
    sender_driven = True

    def init_on_sender(self, model_id: str = "module", context: Any = None, **given: Any) -> None:
        """ValueError: neither the transform nor its actors were given."""
        if given.get("actors") is None and not hasattr(context, "actors"):  # the class is the user's
            raise ValueError("RayModuleTransformScheme needs context=<the RayModuleTransform>, or actors=[…]")
        super().init_on_sender(model_id, context, **given)


# --- in an actor ---


def _join(instance: Any, scheme: RayWeightSyncScheme, model_id: str, worker_idx: int) -> None:
    """Connect to the sender, which has closed the last connection; first leave that, and dead senders."""
    key = scheme._address.unix
    for known, joined in [*_joined.items()]:
        receiver = joined._receiver  # None while another thread has the scheme leave
        if known == (key, worker_idx) or receiver is None or receiver.phase != "open":
            _leave(instance, *known)
    scheme.init_on_receiver(model_id, context=instance, worker_idx=worker_idx)
    scheme.connect()
    _joined[key, worker_idx] = scheme


def _leave(instance: Any, key: str, worker_idx: int) -> None:
    """Disconnect from the sender; the model keeps its weights."""
    if (scheme := _joined.pop((key, worker_idx), None)) is not None:
        scheme.shutdown()


# --- in the trainer ---


def _job() -> str:
    """Return the id of this process's job in Ray; empty without one."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise missing_extra(error, "ray") from error
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.get_node_id()} {context.get_job_id()}"


def _raise_failures(ends: Mapping[int, Any]) -> None:
    errors = {worker: end.exception() for worker, end in ends.items() if end.done()}
    causes = {worker: Cause("failed", str(error)) for worker, error in errors.items() if error is not None}
    raise_causes(causes, "the join failed")
