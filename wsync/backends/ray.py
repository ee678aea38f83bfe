"""Ray: actors coordinate; memory carries on one machine, ``torch.distributed`` between several.

The sender drives both ends of any actor that it is given: it has the actor join by a call through Ray. From then on
news come by a line of their own, and are installed beside whatever the actor does; a Ray call for each update would
queue behind a rollout, or need a concurrency group that the actor's class has to declare (a call in a group that it has
not declared ends the actor's process).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import ray
from ray.actor import ActorHandle

from wsync.counting import the_one_count
from wsync.errors import NotConnected, WeightSyncError
from wsync.network.ends import Seed, network_receiver, network_sender
from wsync.network.ray_actors import Actors, Calls
from wsync.network.receiver import GroupReceiver
from wsync.network.sender import GroupSender
from wsync.ports import SenderPort
from wsync.roles import Trainer
from wsync.scheme import WeightSyncScheme

_GRACE = 5.0  # seconds in which Ray is to hear that an actor has joined, or let go; of a busy one it hears later
_joined: dict[tuple[str, int], WeightSyncScheme] = {}  # in an actor: what a sender had it join, and as which worker


@runtime_checkable
class ActorContext(Protocol):
    """A context that says which actors have the model."""

    @property
    def actors(self) -> Sequence[ActorHandle]:
        """By worker index."""
        ...


class RayTransport(SenderPort):
    """The sender's line to some actors."""


class RayWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization to Ray actors.

    Given actors (``init_on_sender(..., actors=[…])``), the sender alone drives both ends: ``connect()`` has each actor
    find the model in itself, at the path ``model_id``, and join. Otherwise each actor calls ``init_on_receiver`` and
    ``connect`` on the scheme that it was sent.

    Args:
        strategy: the format in which weights are handed out.
        backend: ``"gloo"``, or ``"nccl"`` for weights on GPUs.
        sync: whether ``send`` waits until its promise holds.
        timeout: seconds for ``connect`` and ``send``; None for no limit.
        host: the sender's address. Loopback, unless somebody says which interface may be reached from other nodes;
            ``"node"`` is this node's address in the Ray cluster.
        bind: whether parameters may be bound to received memory. Say False for actors that train.
        checksum: whether an update carries a checksum, which an actor verifies before it stages or applies it. None: it
            does where gloo or nccl carries it, and not from memory to memory.
        shared_memory: whether actors on the sender's machine take weights from its memory, which costs a fraction of
            what a group does. Where False, gloo carries to all: as it would over a network; so does nccl in any case.
    """

    name = "ray"
    _transport = RayTransport

    def __init__(
        self,
        strategy: Any = "tensordict",
        backend: str = "gloo",
        *,
        sync: bool = True,
        timeout: float | None = 60.0,
        host: str = "127.0.0.1",
        bind: bool = True,
        checksum: bool | None = None,
        shared_memory: bool = True,
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind)
        self.backend = backend
        self.host = host
        self.checksum = checksum
        self.shared_memory = shared_memory
        self._actors = Actors()

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
            context: a collector; or what has ``actors``.
            actors: those that the sender is to have join, by worker index.
            given: as there.

        Raises:
            NotConnected: Ray is not initialised.
        """
        if not ray.is_initialized():
            raise NotConnected(
                "Ray is not initialised: call ray.init(), or ray.init(address=…), before init_on_sender()"
            )
        if actors is None and isinstance(context, ActorContext):
            actors = context.actors
        if actors is not None:
            given["num_workers"] = the_one_count({"num_workers": given.get("num_workers"), "actors": len(actors)})
        super().init_on_sender(model_id, context, **given)
        self._actors = Actors(actors or ())

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """The rendezvous: see ``WeightSyncScheme.connect``. Has those actors join that are not there yet.

        Raises:
            NotConnected: as there; or ``ray.shutdown`` was called since.
            WorkerFailed: an actor could not join; with its own error.
            Exception: else as there.
        """
        role = self._role
        if not self._actors or not isinstance(role, Trainer):
            super().connect(worker_idx=worker_idx, weights=weights)
            return
        role.end.listen()  # whoever has gone by now is to join again
        with self._joining([i for i in range(len(self._actors)) if i not in role.end.workers]) as sentinels:
            role.sender.connect(weights, sentinels)

    def readmit(self, worker_idx: int, sentinel: int | None = None, timeout: float | None = None) -> None:
        """Meet a worker in the place of one that has died: see ``WeightSyncScheme.readmit``.

        An actor that the sender was given, and that Ray has started anew (``max_restarts``), is had join. So is one
        that lives: it follows with the model that it has at the path by now, and lets go of what was there before.

        Raises:
            WorkerFailed: it could not; with its own error.
        """
        if not self._actors:
            super().readmit(worker_idx, sentinel, timeout)
            return
        with self._joining([worker_idx], anew=True) as sentinels:  # an actor's end is a failure that they tell
            super().readmit(worker_idx, sentinels[worker_idx], timeout)

    @contextmanager
    def _joining(self, workers: Sequence[int], *, anew: bool = False) -> Iterator[Mapping[int, int]]:
        """Have actors join; descriptors that are readable if they fail, whose errors are raised in place of others.

        One that an attempt before this was given up for is not asked again: Ray has it join when it is there, and a
        second time would undo the first.
        """
        calls = Calls({i: self._actors.ask(i, _join, self, self.model_id, i, anew) for i in workers})
        try:
            yield calls.sentinels
            calls.settle(_GRACE)
        except WeightSyncError as error:
            raise calls.explain(error) from error
        finally:
            calls.close()

    def shutdown(self) -> None:
        """Let everything go, in the actors that the sender had join as well."""
        actors, self._actors = self._actors, Actors()
        name = _name(self) if actors else ""
        super().shutdown()
        if actors.reachable:
            left = [actors.call(worker, _leave, name, worker) for worker in range(len(actors))]
            ray.wait(left, num_returns=len(left), timeout=_GRACE)  # one that is dead has left

    def _make_sender_end(self, num_workers: int) -> tuple[GroupSender, Seed]:
        host = ray.util.get_node_ip_address() if self.host == "node" else self.host
        return network_sender(num_workers, host, self.backend, shared_memory=self.shared_memory, checksum=self.checksum)

    def _make_receiver_end(self, seed: Seed) -> GroupReceiver:
        return network_receiver(
            lambda worker, deadline: [seed], backend=self.backend, retains=self.bind, timeout=self.timeout
        )

    def __getstate__(self) -> dict[str, Any]:
        """Options and the way to the sender."""
        return {**super().__getstate__(), "_actors": Actors()}


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Weight synchronization to a module inside a ``RayModuleTransform``, an environment transform in a Ray actor.

    The sender drives both ends: it is initialised with the transform (``context=transform``) or its actors, and
    ``connect()`` is called on the sender alone.
    """

    name = "ray_module_transform"

    def init_on_sender(self, model_id: str = "module", context: Any = None, **given: Any) -> None:
        """Set up the trainer's end: see ``RayWeightSyncScheme.init_on_sender``.

        Raises:
            ValueError: neither the transform nor its actors were given.
        """
        if given.get("actors") is None and not isinstance(context, ActorContext):
            raise ValueError("RayModuleTransformScheme needs context=<the RayModuleTransform>, or actors=[…]")
        super().init_on_sender(model_id, context, **given)


def _join(instance: Any, scheme: RayWeightSyncScheme, model_id: str, worker_idx: int, anew: bool) -> None:
    """In an actor: follow the sender. ``anew``: it has dismissed this worker, which may not know of it."""
    name = _name(scheme)
    if anew:
        _leave(instance, name, worker_idx)
    scheme.init_on_receiver(model_id, context=instance, worker_idx=worker_idx)
    scheme.connect()
    _joined[name, worker_idx] = scheme


def _leave(instance: Any, name: str, worker_idx: int) -> None:
    """In an actor: follow the sender no more; the model keeps its weights."""
    scheme = _joined.pop((name, worker_idx), None)
    if scheme is not None:
        scheme.shutdown()


def _name(scheme: RayWeightSyncScheme) -> str:
    return scheme._seed.endpoint.token.hex()
