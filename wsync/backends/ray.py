"""Ray: actors coordinate; shared memory carries on one machine, ``torch.distributed`` between several.

The sender drives both ends of any actor that it is given: it has the actor join by a call through Ray. Updates are then
announced over a connection of their own, and installed beside whatever the actor does. A Ray call for each update would
queue behind a rollout, or need a concurrency group that the actor's class declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Unpack, runtime_checkable

import torch

from wsync.control.processes import Process, Processes
from wsync.errors import NotConnected, WeightSyncError, missing_extra
from wsync.options import SchemeOptions
from wsync.process_group import INLINE_BYTES, DistributedTransport, check_backend, device_of
from wsync.rendezvous import SocketRendezvous
from wsync.roles import ReceiverRole, SenderRole
from wsync.scheme import WeightSyncScheme
from wsync.sending.counting import single_count
from wsync.sending.membership import checked_worker_index
from wsync.weights.strategy import Format

if TYPE_CHECKING:  # Ray is imported when a scheme is initialised on a sender: most programs do without
    from ray.actor import ActorHandle

    from wsync.backends.ray_actors import Actors
    from wsync.backends.ray_objects import ObjectPublisher, RayObjectTransport
    from wsync.sender import Sender

_GRACE = 5.0  # seconds to wait for Ray to report the calls as finished; calls of busy actors may finish later
_joined: dict[tuple[str, int], WeightSyncScheme] = {}  # in an actor: by the sender's token and the worker's index


@runtime_checkable
class ActorContext(Protocol):
    """A context with the actors that have the model."""

    @property
    def actors(self) -> Sequence[ActorHandle]:
        """By worker index."""
        ...


class RayTransport(DistributedTransport):
    """Weights through ``torch.distributed``, to one actor.

    Args:
        remote_actor: the actor's handle, for reference.
        worker_idx: its worker index.
        backend: ``"gloo"`` or ``"nccl"``.
        options: as for ``DistributedTransport``.
    """

    def __init__(
        self,
        *,
        remote_actor: ActorHandle | None = None,
        worker_idx: int | None = None,
        backend: str = "gloo",
        **options: Any,
    ) -> None:
        super().__init__(backend=backend, worker=worker_idx or 0, **options)
        self.remote_actor = remote_actor


class RayWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization to Ray actors.

    Given actors (``init_on_sender(..., actors=[…])``), the sender alone drives both ends: ``connect()`` has each actor
    find the model in itself, at the path ``model_id``, and join. Otherwise each actor calls ``init_on_receiver`` and
    ``connect`` on the scheme that it was sent.

    Args:
        backend, checksum, shared_memory, inline_bytes: see ``DistributedWeightSyncScheme``.
        host: the sender's address, by which actors reach it; loopback by default. ``"node"`` is this node's address in
            the Ray cluster.
        transport: ``"group"``: shared memory on the sender's machine, a process group for each actor elsewhere.
            ``"object_store"``: Ray's object store, one ``ray.put`` for each update: for many actors on many nodes.
        strategy, sync, timeout, bind, options: see ``WeightSyncScheme``.

    Raises:
        ValueError: an unknown backend or transport; or ``"nccl"`` with the object store, which has no GPU memory.
    """

    name = "ray"
    collectors: ClassVar[tuple[str, ...]] = ("ray", "ray_async", "single")

    def __init__(
        self,
        strategy: Format = "tensordict",
        backend: str = "gloo",
        *,
        sync: bool = True,
        timeout: float | None = 60.0,
        host: str = "127.0.0.1",
        bind: bool = True,
        checksum: bool | None = None,
        shared_memory: bool = True,
        inline_bytes: int = INLINE_BYTES,
        transport: Literal["group", "object_store"] = "group",
        **options: Unpack[SchemeOptions],
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind, **options)
        self.backend = check_backend(backend)
        self.host = host
        self.checksum = checksum
        self.shared_memory = shared_memory
        self.inline_bytes = inline_bytes
        if transport not in ("group", "object_store"):
            raise ValueError(f"transport is 'group' or 'object_store', not {transport!r}")
        if transport == "object_store" and backend == "nccl":
            raise ValueError("Ray's object store has no GPU memory: transport='object_store' needs backend='gloo'")
        self.transport: Literal["group", "object_store"] = transport
        self._publisher: ObjectPublisher | None = None
        self._actors: Actors | None = None

    def create_transport(self, worker_idx: int | None = None) -> RayTransport | RayObjectTransport:
        """Return the transport to (or in) an actor."""
        if self.transport == "object_store":
            from wsync.backends.ray_objects import RayObjectTransport, mailbox_name

            return RayObjectTransport(mailbox_name(self._address.token), worker_idx or 0, self._publisher)
        return RayTransport(worker_idx=worker_idx, backend=self.backend, inline_bytes=self.inline_bytes)

    def create_rendezvous(self) -> SocketRendezvous:
        """See ``WeightSyncScheme``."""
        if self.host != "node":
            return SocketRendezvous(self.host)
        from ray.util import get_node_ip_address

        return SocketRendezvous(get_node_ip_address())

    @property
    def device(self) -> torch.device:
        """See ``WeightSyncScheme``."""
        return device_of(self.backend)

    def _uses_arena(self) -> bool:
        return self.shared_memory and self.backend == "gloo" and self.transport == "group"

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        actors: Sequence[ActorHandle] | None = None,
        **given: Any,
    ) -> None:
        """Set up the trainer's end: see ``WeightSyncScheme.init_on_sender``.

        Args:
            model_id: the model's name, and its path in each actor.
            context: a collector; or an object with ``actors``.
            actors: those that the sender has join, by worker index.
            given: as there.

        Raises:
            ModuleNotFoundError: Ray is not installed; names the extra.
            NotConnected: Ray is not initialised.
        """
        try:
            import ray
        except ModuleNotFoundError as error:
            raise missing_extra(error, "ray") from error
        from wsync.backends.ray_actors import Actors

        if not ray.is_initialized():
            raise NotConnected(
                "Ray is not initialised: call ray.init(), or ray.init(address=…), before init_on_sender()"
            )
        if actors is None and isinstance(context, ActorContext):
            actors = context.actors
        if actors is not None:
            given["num_workers"] = single_count({"num_workers": given.get("num_workers"), "actors": len(actors)})
        super().init_on_sender(model_id, context, **given)
        try:
            self._actors = Actors(actors) if actors else None
            if self.transport == "object_store":
                from wsync.backends.ray_objects import ObjectPublisher, mailbox_name

                self._publisher = ObjectPublisher(mailbox_name(self._address.token))
        except BaseException:  # also Ctrl-C: init_on_sender can be called again
            self.shutdown()
            raise

    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, processes: Processes | None = None
    ) -> None:
        """Connect: see ``WeightSyncScheme.connect``. Actors that have not joined are called to join.

        Raises:
            NotConnected: as there; or ``ray.shutdown`` was called since.
            WorkerFailed: an actor could not join; with its own error.
            ValueError: ``processes``, with actors: Ray reports the end of one.
            Exception: else as there.
        """
        (role := self._role).require_not_forked()
        if self._actors is None or not isinstance(role, SenderRole):
            super().connect(worker_idx=worker_idx, weights=weights, processes=processes)
            return
        role.reject_arguments(worker_idx=worker_idx)
        if processes is not None:
            raise ValueError("Ray reports the end of its actors: leave processes= out")
        with role.sender.exclusive():  # else this could take the acknowledgement that another thread's send waits for
            role.sender.channel.process_arrived_messages()  # an actor that has gone meanwhile has to join again
            missing = [worker for worker in range(len(self._actors)) if worker not in role.sender.channel.workers]
        with self._joining(self._actors, role.sender, missing) as sentinels:
            role.sender.connect(weights, sentinels)

    def readmit(self, worker_idx: int, process: Process | None = None, timeout: float | None = None) -> None:
        """Accept a worker in the place of one that has died: see ``WeightSyncScheme.readmit``.

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
        sender = self._role.as_sender("readmit").sender
        worker_idx = checked_worker_index(worker_idx, sender.num_workers)
        with self._joining(self._actors, sender, [worker_idx]) as sentinels:
            sender.readmit(worker_idx, sentinels[worker_idx], timeout)

    @contextmanager
    def _joining(self, actors: Actors, sender: Sender, workers: Sequence[int]) -> Iterator[Mapping[int, int]]:
        """Call actors to join. Yields, per worker, a descriptor that becomes readable if its call fails.

        If a call failed, its error is raised, also in place of one in the block. While an actor's earlier join call is
        queued, it is not called again: Ray will run that call, and a second one would disconnect the actor. Any other
        actor is disconnected first: its join call ends its old connection, which must not be accepted as the new one.
        """
        from wsync.backends.ray_actors import ActorCalls

        refs = {}
        for worker in workers:
            ref = actors.pending(worker)
            if ref is None:
                with sender.exclusive():  # another thread's send ends first
                    sender.disconnect(worker)
                ref = actors.call_kept(worker, _join, self, self.model_id, worker)
            refs[worker] = ref
        calls = ActorCalls(refs)
        try:
            yield calls.sentinels
            calls.settle(_GRACE)
            calls.raise_failures()
        except WeightSyncError:
            calls.raise_failures()
            raise
        finally:
            calls.close()

    def shutdown(self) -> None:
        """Release everything, also in the actors that the sender had join."""
        actors, publisher = self._actors, self._publisher
        if self._role.inherited:  # they are the parent's
            actors = publisher = None
        key = _key(self) if actors is not None and self._address is not None else ""
        super().shutdown()
        if actors is not None and actors.reachable:
            actors.wait([actors.call(worker, _leave, key, worker) for worker in range(len(actors))], _GRACE)
        if publisher is not None:
            publisher.close()
        self._actors = self._publisher = None  # last: after Ctrl-C another call does the rest

    def __getstate__(self) -> dict[str, Any]:
        """Return the options and the sender's address."""
        return {**super().__getstate__(), "_actors": None, "_publisher": None}


def _join(instance: Any, scheme: RayWeightSyncScheme, model_id: str, worker_idx: int) -> None:
    """In an actor: connect to the sender, which has closed the last connection; first leave that, and dead senders."""
    key = _key(scheme)
    for known, joined in [*_joined.items()]:
        role = joined._role  # no receiver's while another thread has the scheme leave
        if known == (key, worker_idx) or not isinstance(role, ReceiverRole) or not role.receiver.connected:
            _leave(instance, *known)
    scheme.init_on_receiver(model_id, context=instance, worker_idx=worker_idx)
    scheme.connect()
    _joined[key, worker_idx] = scheme


def _leave(instance: Any, key: str, worker_idx: int) -> None:
    """In an actor: disconnect from the sender; the model keeps its weights."""
    if (scheme := _joined.pop((key, worker_idx), None)) is not None:
        scheme.shutdown()


def _key(scheme: RayWeightSyncScheme) -> str:
    return scheme._address.token.hex()
