"""Shared memory: weights are written once for all workers, who bind to them without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from tensordict import TensorDict, TensorDictBase

from wsync.errors import NotConnected
from wsync.local.receiver import LocalReceiver
from wsync.local.rendezvous import Endpoint
from wsync.local.sender import LocalSender
from wsync.pipes import PipedScheme
from wsync.ports import SenderPort
from wsync.roles import Trainer
from wsync.sending.sender import Sender
from wsync.sending.source import DeviceMap, Source
from wsync.transport import TransportBackend
from wsync.weights.snapshot import Snapshot
from wsync.weights.strategy import Format


class SharedMemTransport(SenderPort):
    """The one line to all workers."""

    def __init__(
        self, sender: Sender, end: LocalSender, connect: Callable[[], None], worker_ids: Sequence[int] | None = None
    ) -> None:
        super().__init__(sender, connect, worker_ids)
        self._end = end

    @property
    def unique_weights(self) -> list[TensorDictBase]:
        """The published buffers, each once; the user's own, where they were registered.

        Who writes into one by hand is seen by bound parameters at once, unversioned, at their own risk.
        """
        if self._sender.source.mirror is not None:
            return [self._sender.source.mirror]
        layout = self._sender.layout
        if layout is None:
            return []
        return [
            TensorDict({tuple(name.split(".")): view for name, view in zip(layout.names, views, strict=True)})
            for views in self._end.published_views()
        ]


@runtime_checkable
class CachingContext(Protocol):
    """A context that has shared buffers already."""

    cached_weights: TensorDictBase


class _Unregistered(Source):
    """Where ``auto_register`` is off and nothing was registered: the first weights may not define the buffers."""

    def __init__(self, model_id: str) -> None:
        super().__init__()
        self._model_id = model_id

    def first(self, weights: object) -> Snapshot:
        """Refuse to begin.

        Raises:
            NotConnected: always; says what to call.
        """
        raise NotConnected(
            f"'{self._model_id}' has no shared buffers, and auto_register is off: call "
            f"register_shared_weights('{self._model_id}', weights) before init_on_sender()"
        )


class SharedMemWeightSyncScheme(PipedScheme):
    """Weight synchronization through shared memory, for workers on the trainer's machine.

    Args:
        policy_weights: ``{model_id: TensorDict}`` of buffers registered from the start.
        strategy: the format in which weights are handed out.
        auto_register: whether the first weights that are sent define the shared buffers. If not,
            ``register_shared_weights`` has to come first.
        sync: whether ``send`` waits until its promise holds.
        per_worker_weights: whether each worker has slots of its own, as is right if they are given different weights.
        timeout: seconds for ``connect`` and ``send``; None for no limit.
        acknowledge: when a ``send`` is finished: ``"installed"``, when every worker has said that its model has the
            weights; ``"published"``, when every forward that starts from then on will use them, which needs no answer:
            a worker then takes them on its way into a forward, or while it waits in ``receive``. Not for workers that
            pass updates on to workers of their own.
        bind: whether parameters may be bound to the shared memory. Say False for workers that train.
        checksum: whether each update carries a checksum, which a worker verifies before it stages or applies it, on
            its way into a forward. With ``"published"`` a corrupt one leaves the model as it was, and the error
            reaches the trainer with the next ``send``. Each worker then keeps the slot that its model is on, so there
            may be as many more slots as workers that do not keep up.
    """

    name = "shared_mem"

    def __init__(
        self,
        policy_weights: Mapping[str, TensorDictBase] | None = None,
        strategy: Format = "tensordict",
        auto_register: bool = True,
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        timeout: float | None = 60.0,
        acknowledge: Literal["installed", "published"] = "installed",
        bind: bool = True,
        checksum: bool = False,
    ) -> None:
        if acknowledge not in ("installed", "published"):
            raise ValueError(f"acknowledge is 'installed' or 'published', not {acknowledge!r}")
        super().__init__(strategy, sync, timeout=timeout, bind=bind)
        self.auto_register = auto_register
        self.per_worker_weights = per_worker_weights
        self.acknowledge = acknowledge
        self.checksum = checksum
        self._registered: dict[str, TensorDictBase] = dict(policy_weights or {})

    def register_shared_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Make ``weights`` the buffers of ``model_id``: they stay the user's own.

        What is sent is written into them as well. A ``send()`` without arguments sends what is in them, if the sender
        has no model of its own.

        Raises:
            RuntimeError: the model has buffers already.
            TypeError: ``weights`` are not a TensorDict.
        """
        if not isinstance(weights, TensorDictBase):
            raise TypeError(f"shared weights are a TensorDict, not a {type(weights).__name__}")
        if model_id in self._registered or self._role is not None:
            raise RuntimeError(f"'{model_id}' has its buffers already: register them once, before init_on_sender()")
        self._registered[model_id] = weights

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        cached_weights: TensorDictBase | None = None,
        **given: Any,
    ) -> None:
        """Set up the trainer's end: see ``PipedScheme.init_on_sender``.

        Args:
            model_id: the model's name.
            context: as there; or what has ``cached_weights``.
            cached_weights: the older API's way to ``register_shared_weights``.
            given: as there.
        """
        if cached_weights is None and isinstance(context, CachingContext):
            cached_weights = context.cached_weights
        if cached_weights is not None and self._registered.get(model_id) is not cached_weights:
            self.register_shared_weights(model_id, cached_weights)
        super().init_on_sender(model_id, context, **given)

    @property
    def weights(self) -> Any:
        """See ``WeightSyncScheme.weights``; on a sender that was given none, those that it has published.

        None where workers have different ones: ``shared_transport.unique_weights`` are all of them.
        """
        own, line = super().weights, self.shared_transport
        published = line.unique_weights if own is None and line is not None else []
        return self.strategy.extract_weights(published[0]) if len(published) == 1 else own

    @property
    def shared_transport(self) -> SharedMemTransport | None:
        """The one line to all workers, on the sender; None in one process, where nothing is shared."""
        role = self._role
        port = self._port(role, None) if isinstance(role, Trainer) else None
        return port if isinstance(port, SharedMemTransport) else None

    def _port(self, role: Trainer, worker_ids: Sequence[int] | None) -> TransportBackend:
        if not isinstance(role.end, LocalSender):
            return super()._port(role, worker_ids)
        return SharedMemTransport(role.sender, role.end, self.connect, worker_ids)

    def _behind(self, worker: int) -> None:
        """One line leads to all."""

    @property
    def _published(self) -> bool:
        return self.acknowledge == "published"

    def _make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None) -> Source:
        mirror = self._registered.get(model_id)
        if not self.auto_register and mirror is None:
            return _Unregistered(model_id)
        return Source(weights, self.strategy, device_map_fn=device_map_fn, apart=self.per_worker_weights, mirror=mirror)

    def _make_sender_end(self, num_workers: int) -> tuple[LocalSender, Endpoint]:
        end = LocalSender(num_workers, retains=True, checksum=self.checksum)
        return end, end.endpoint

    def _make_receiver_end(self, seed: Endpoint) -> LocalReceiver:
        return LocalReceiver(seed, retains=self.bind)

    def __getstate__(self) -> dict[str, Any]:
        """Options and the way to the sender: registered buffers stay with the sender."""
        return {**super().__getstate__(), "_registered": {}}
