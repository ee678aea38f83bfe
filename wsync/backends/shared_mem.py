"""Shared memory: weights are written once for all workers; the workers' models bind to them without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, Unpack, runtime_checkable

from tensordict import TensorDict, TensorDictBase

from wsync.backends.shared_mem_transport import SharedMemTransport
from wsync.legacy.pipes import older_transport
from wsync.options import SchemeOptions
from wsync.roles import SenderRole
from wsync.scheme import WeightSyncScheme
from wsync.scheme_transports import SenderTransport
from wsync.sender import Sender
from wsync.sending.channel import SenderSideChannel
from wsync.sending.source import DeviceMap, Source
from wsync.transport import TransportBackend
from wsync.weights.snapshot import snapshot
from wsync.weights.strategy import Format


class SharedMemSenderTransport(SenderTransport, SharedMemTransport):
    """The transport to all workers of an initialised scheme, with versions and acknowledgements.

    Args:
        sender: the sender of the scheme.
        channel: the channel to its workers.
        connect: the scheme's.
        model_id: the scheme's.
    """

    def __init__(
        self, sender: Sender, channel: SenderSideChannel, connect: Callable[[], None], model_id: str | None
    ) -> None:
        SenderTransport.__init__(self, sender, connect, None, model_id)
        self._channel = channel

    def register_weights(self, weights: Any) -> None:
        """Refuse: the buffers are the scheme's.

        Raises:
            RuntimeError: always; names the call that is meant.
        """
        raise RuntimeError("register the buffers of a scheme by its register_shared_weights(), before init_on_sender()")

    @property
    def unique_weights(self) -> list[TensorDictBase]:
        """The published buffers, each once; the user's own, where they were registered.

        A manual write into one is visible to bound parameters at once, without a version, at the user's own risk.
        """
        registered, layout = self._sender.source.registered_weights, self._sender.layout
        if registered is not None:
            return [registered]
        if layout is None:
            return []
        return [
            TensorDict({tuple(name.split(".")): view for name, view in zip(layout.names, views, strict=True)})
            for views in self._channel.published_views()
        ]


@runtime_checkable
class CachingContext(Protocol):
    """A context that has shared buffers already."""

    cached_weights: TensorDictBase


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization through shared memory, for workers on the trainer's machine.

    Args:
        policy_weights: ``{model_id: TensorDict}`` of buffers that are registered from the start.
        auto_register: whether the first weights that are sent define the shared buffers. Otherwise
            ``register_shared_weights`` has to be called before ``init_on_sender``: without it, ``connect`` (if the
            sender was given a model or weights) and ``send`` raise ``NotConnected``.
        per_worker_weights: whether each worker has slots of its own; for workers that are given different weights.
        acknowledge: when a ``send`` is finished: ``"installed"``, when every worker has acknowledged that its model has
            the weights; ``"published"``, when every forward that starts from then on will use them, which needs no
            acknowledgement: a worker installs them on its way into a forward, or while it waits in ``receive``. Not for
            workers that pass updates on to workers of their own.
        checksum: whether each update carries a checksum, which a worker checks before it prepares or installs it, on
            its way into a forward. With ``"published"`` a corrupt one leaves the model as it was, and the error is
            raised by the next ``send``. Each worker then keeps the slot that its model is bound to, so there may be one
            more slot for each worker that has not installed the newest version.
        strategy, sync, timeout, bind, options: see ``WeightSyncScheme``.
    """

    name = "shared_mem"
    arena_only = True
    binds_arena = True

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
        **options: Unpack[SchemeOptions],
    ) -> None:
        if acknowledge not in ("installed", "published"):
            raise ValueError(f"acknowledge is 'installed' or 'published', not {acknowledge!r}")
        super().__init__(strategy, sync, timeout=timeout, bind=bind, **options)
        self.auto_register = auto_register
        self.per_worker_weights = per_worker_weights
        if policy_weights is not None and not isinstance(policy_weights, Mapping):
            raise TypeError(f"policy_weights is a mapping {{model_id: TensorDict}}, not {policy_weights!r}")
        self.acknowledge = acknowledge
        self.checksum = checksum
        self._registered: dict[str, TensorDictBase] = {}
        for model_id, weights in (policy_weights or {}).items():
            self.register_shared_weights(model_id, weights)

    def register_shared_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Make ``weights`` the buffers of ``model_id``: they stay the user's own.

        What is sent is written into them as well. A ``send()`` without arguments sends what is in them, if the sender
        has no model of its own.

        Where all of them lie in shared memory already (``share_memory_()``, ``memmap_()``), the parameters of workers
        that bind are bound to them: training them in place is seen by the next forward, without a ``send``, at the
        user's own risk (a forward may see part of a step). Buffers of the model (``BatchNorm``) are copied with each
        ``send``, as always. Workers see only what is sent with ``bind=False``, ``per_worker_weights``,
        ``send_transform`` or ``device_map_fn``.

        Raises:
            RuntimeError: the model has buffers already, or the scheme is initialised already.
            TypeError: ``weights`` are not a TensorDict.
            ValueError: ``initiator="receiver"``: a worker would see them change before it pulls.
        """
        if self.initiator == "receiver":
            raise ValueError(f"with initiator='receiver' workers pull: they cannot share the weights of '{model_id}'")
        if not isinstance(weights, TensorDictBase):
            raise TypeError(f"shared weights are a TensorDict, not a {type(weights).__name__}")
        if model_id in self._registered:
            raise RuntimeError(f"'{model_id}' has its buffers already: register them once")
        if self.model_id is not None:
            raise RuntimeError(f"this scheme is initialised already: register '{model_id}' before init_on_sender()")
        self._registered[model_id] = weights

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        cached_weights: TensorDictBase | None = None,
        **given: Any,
    ) -> None:
        """Set up the trainer's end: see ``WeightSyncScheme.init_on_sender``.

        Args:
            model_id: the model's name.
            context: as there; or an object with ``cached_weights``.
            cached_weights: the older API's way to ``register_shared_weights``.
            given: as there.
        """
        if cached_weights is None and isinstance(context, CachingContext):
            cached_weights = context.cached_weights
        if cached_weights is not None and self._registered.get(model_id) is not cached_weights:
            self.register_shared_weights(model_id, cached_weights)
        super().init_on_sender(model_id, context, **given)
        role, registered = self._role, self._registered.get(model_id)
        if registered is None or self.per_worker_weights or not self.bind:
            return
        if isinstance(role, SenderRole) and isinstance(role.sender.channel, SenderSideChannel):
            source = role.sender.source
            if not source.changes_weights:
                try:
                    source.shared_buffers = role.sender.channel.share_registered(snapshot(registered).tensors)
                except BaseException:  # also Ctrl-C: init_on_sender can be called again
                    self.shutdown()
                    raise

    def create_transport(self, worker_idx: Any = None) -> TransportBackend:
        """Return the transport to all workers; before ``init_on_sender``, one without a scheme.

        Args:
            worker_idx: ignored: one transport leads to all. The older API's ``pipe_or_context``: see ``wsync.legacy``.

        Raises:
            ValueError: not a pipe of this scheme.
        """
        older = older_transport(self, self._pipes, worker_idx)
        return older or self.shared_transport or SharedMemTransport()

    @property
    def shared_transport(self) -> SharedMemSenderTransport | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The transport to all workers, on the sender; None in one process, where nothing is shared."""
        role = self._role
        if not isinstance(role, SenderRole) or not isinstance(role.sender.channel, SenderSideChannel):
            return None
        return SharedMemSenderTransport(role.sender, role.sender.channel, self.connect, role.model_id)

    @property
    def weights(self) -> Any:
        """See ``WeightSyncScheme.weights``; on a sender that was given none, those that it has published.

        None where workers have different ones: ``shared_transport.unique_weights`` are all of them.
        """
        own, transport = super().weights, self.shared_transport
        published = transport.unique_weights if own is None and transport is not None else []
        return self.strategy.extract_weights(published[0]) if len(published) == 1 else own

    @property
    def acknowledges(self) -> bool:
        """See ``WeightSyncScheme``."""
        return self.acknowledge == "installed" and super().acknowledges

    def _make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None, **options: Any) -> Source:
        registered = self._registered.get(model_id)
        if not self.auto_register and registered is None:
            options["undefined"] = (
                f"'{model_id}' has no shared buffers, and auto_register is off: call "
                f"register_shared_weights('{model_id}', weights) before init_on_sender()"
            )
        options |= {"own_buffers": self.per_worker_weights, "registered_weights": registered}
        return super()._make_source(model_id, weights, device_map_fn, **options)

    def shutdown(self) -> None:
        """See ``WeightSyncScheme.shutdown``; registered weights stay the user's."""
        role = self._role
        super().shutdown()
        if isinstance(role, SenderRole) and role.sender.source.shared_buffers is not None:
            role.sender.source.shared_buffers.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the options and the sender's address: registered weights stay with the sender."""
        return {**super().__getstate__(), "_registered": {}}
