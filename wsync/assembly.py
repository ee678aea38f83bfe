"""Puts the ends of a scheme together from their parts: sender and receiver, channels, sources and destinations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from multiprocessing import util
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from torch import nn

from wsync.control import Listener
from wsync.in_process import InProcessChannel
from wsync.paths import find_model, find_or_none
from wsync.receiver import Receiver
from wsync.receiving.cascade import cascade_of
from wsync.receiving.channel import WorkerSideChannel
from wsync.receiving.handshake import ReaderFactory
from wsync.receiving.install_policy import InstallOnRequest
from wsync.receiving.updating import ModelUpdater
from wsync.roles import SenderRole
from wsync.sender import Sender
from wsync.sending.channel import SenderSideChannel
from wsync.sending.routes import Routes
from wsync.transforms.chain import compose, delta_of
from wsync.transport import FlatTransport, TransportBackend, TransportFactory
from wsync.weights.targets import Destination, Load

if TYPE_CHECKING:
    from wsync.scheme_base import SchemeBase
    from wsync.sending.source import Source


def model_and_weights(
    context: Any, model_id: str, model: nn.Module | None, weights: Any, params_map: Mapping[int, Any] | None
) -> tuple[Any, Any]:
    """Return the sender's model, if it has one, and what ``send()`` without arguments reads.

    Raises:
        ValueError: several of the three were given.
    """
    sources = {"model": model, "weights": weights, "params_map": params_map}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"give one of model, weights and params_map, not {' and '.join(given)}")
    if not given and context is not None:
        model = find_or_none(context, model_id)
    return model, params_map or (model if weights is None else weights)


def make_sender(scheme: SchemeBase, source: Source, num_workers: int, listener: Listener) -> Sender:
    """Return the sender to ``num_workers`` workers, which connect to ``listener``.

    Workers are accepted during ``connect`` and ``readmit``, by the calling thread.
    """
    on_request = scheme.initiator == "receiver"
    routes = Routes(
        listener,
        num_workers,
        _transport_factory(scheme),
        scheme.strategy,
        arena=scheme._uses_arena(),
        binds_arena=scheme.binds_arena,
        checksum=scheme.checksum,
        delta=delta_of(scheme.send_transform),
        on_request=on_request,
    )
    return Sender(
        SenderSideChannel(routes, scheme.device),
        source,
        num_workers,
        scheme.timeout,
        delivers_at_connect=scheme.delivers_at_connect,
        acknowledges=scheme.acknowledges,
        on_request=on_request,
        record=scheme.metrics.record,
    )


def _transport_factory(scheme: SchemeBase) -> TransportFactory | None:
    """Return the scheme's factory without a reference to the scheme, which is closed when it is garbage-collected."""
    if scheme.arena_only:
        return None
    reference = WeakMethod(scheme.create_transport)

    def create(worker_idx: int) -> TransportBackend | FlatTransport:
        factory = reference()
        assert factory is not None, "called only during connect and readmit of the scheme"
        return factory(worker_idx)

    return create


def make_receive_channel(scheme: SchemeBase, model_id: str) -> WorkerSideChannel:
    """Return the worker's end of the connection, which ``connect`` will make.

    Raises:
        RuntimeError: there is no sender's address.
    """
    rendezvous, address = scheme.create_rendezvous(), scheme._address
    if address is None and not rendezvous.can_look_up():
        raise RuntimeError("initialise this scheme on the sender first, then pickle or fork it to the worker")
    return WorkerSideChannel(
        lambda worker, deadline: rendezvous.dial(address, model_id, worker, deadline),
        ReaderFactory(
            create_transport=None if scheme.arena_only else scheme.create_transport,
            strategy=scheme.strategy,
            arena=scheme._uses_arena(),
            binds_arena=bool(scheme.binds_arena and scheme.bind),  # parameters to slots of the arena
            binds_buffers=scheme.bind,  # parameters to the receive buffers
            timeout=scheme.timeout,
        ),
        on_connected=rendezvous.connected,
    )


def make_receiver(
    scheme: SchemeBase, model_id: str, context: Any, model: Any, load: Load | None, chunk_bytes: int | None
) -> tuple[Any, Receiver]:
    """Return a worker's model, if it has one, and its receiver: see ``WeightSyncScheme.init_on_receiver``."""
    if model is None and load is None:
        if context is None:
            raise ValueError(f"init_on_receiver('{model_id}') needs the model, a context that has it, or load=")
        model = find_model(context, model_id)
    cascade = cascade_of(context, model_id, model, scheme.strategy)
    if cascade is not None and not scheme.acknowledges:
        raise ValueError(
            f"the context of '{model_id}' passes updates on to workers of its own, so a finished send needs their "
            "acknowledgements: use initiator='sender', with shared_mem also acknowledge='installed', and not a store"
        )
    channel = scheme._open_receiver(model_id)
    transform = compose(scheme.receive_transform, "receive_transform")
    destination = Destination(model, load=load, chunk_bytes=chunk_bytes, transform=transform)
    if scheme.initiator == "sender":
        return model, Receiver(destination, scheme.strategy, channel, cascade=cascade)
    on_request = partial(InstallOnRequest, channel, max_staleness=scheme.max_staleness, timeout=scheme.timeout)
    return model, Receiver(destination, scheme.strategy, channel, make_install_policy=on_request, cascade=cascade)


def connect_in_process(scheme: SchemeBase, model_id: str, model: nn.Module, source: Any) -> SenderRole:
    """Return the role of a scheme with both ends in this process, connected."""

    def connected() -> ModelUpdater:  # called by sender.connect()
        receiver.connect(0, scheme.timeout)
        return receiver.updater

    channel = InProcessChannel(connected)
    destination = Destination(model, transform=compose(scheme.receive_transform, "receive_transform"))
    receiver = Receiver(destination, scheme.strategy, channel)
    source = scheme._make_source(model_id, source, None)
    sender = Sender(channel, source, 1, scheme.timeout, record=scheme.metrics.record)
    sender.connect(None, {})
    return SenderRole(model_id=model_id, model=model, sender=sender, in_process_receiver=receiver)


def close_when_abandoned(role: SenderRole) -> None:
    """Close the channel of the sender when its scheme is garbage-collected, or this process ends, without ``shutdown``.

    It runs before ``multiprocessing`` joins the trainer's child processes, and never in a forked child.
    """
    util.Finalize(role, role.sender.channel.close, exitpriority=0)
