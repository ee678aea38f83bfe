"""A scheme: what happens to one model's weights over its life, on either end.

    trainer   init_on_sender ─→ (pickled to the workers) ─→ connect ─→ send, send, … ─→ shutdown
    worker    init_on_receiver ─→ connect ─→ updates arrive, between two forwards ─→ shutdown

A backend is a subclass that names a transport (``create_transport``) and, where workers do not connect by the address
in the pickled scheme, a rendezvous (``create_rendezvous``).

The *arena* is the shared-memory slots of ``wsync/shm/arena.py``. A model is *bound* if its parameters point directly
into received, possibly shared memory; a worker that writes to its parameters, e.g. trains, sets ``bind=False``, or it
would corrupt the shared copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch
from torch import nn

from wsync.deadlines import as_timeout, deadline_in
from wsync.errors import NotConnected
from wsync.gate import process_gate
from wsync.in_process import InProcessChannel
from wsync.metrics import SyncMetrics
from wsync.paths import find_model, find_or_none
from wsync.receiver import Receiver
from wsync.receiving.channel import SenderChannel
from wsync.registry import load_backend
from wsync.rendezvous import Rendezvous, SocketRendezvous
from wsync.roles import (
    ReceiverRole,
    SenderRole,
    agreed_count,
    close_at_exit,
    receiver_role,
    require_fresh,
    require_own,
    sender_role,
    single_count,
)
from wsync.scheme_transports import ReceiverTransport, SenderTransport
from wsync.sender import Sender
from wsync.sending.channel import WorkerChannel
from wsync.sending.source import DeviceMap, Source, per_worker
from wsync.transport import TransportBackend
from wsync.types import CascadingContext, CollectorContext, SyncReport
from wsync.weights.snapshot import snapshot
from wsync.weights.strategy import Format, WeightStrategy

if TYPE_CHECKING:
    from wsync.legacy.api import WeightReceiver, WeightSender


class WeightSyncScheme(ABC):
    """Carries one model's weights from a trainer to its workers.

    Args:
        strategy: the format in which weights are returned, ``"tensordict"`` or ``"state_dict"``. ``send`` takes both.
        sync: whether ``send`` waits until every worker uses the update; otherwise ``wait_async`` waits for that.
        timeout: seconds for ``connect`` and for ``send``; None for no limit.
        bind: whether a worker's model may be bound (see the module); False if the worker writes to its parameters.

    Attributes:
        metrics: what each update has cost.
    """

    name: ClassVar[str]
    """The backend's name: in configs, in reports."""
    collectors: ClassVar[tuple[str, ...]] = ("multi_sync", "multi_async", "single")
    """The options of Hydra's group ``collector`` that can carry the scheme, if any; the first one is the default."""
    carries: ClassVar[bool] = True
    """Whether anything is sent at all."""
    delivers_at_connect: ClassVar[bool] = True
    """Whether the first weights are delivered by ``connect``; otherwise by the first ``send``."""
    arena: ClassVar[bool] = False
    """Whether workers on the sender's machine take weights from the arena instead of the transport."""
    binds_arena: ClassVar[bool] = False
    """Whether models of workers that use the arena are bound to its slots; otherwise the weights are copied out."""

    def __init__(
        self, strategy: Format = "tensordict", sync: bool = True, *, timeout: float | None = 60.0, bind: bool = True
    ) -> None:
        self._role: SenderRole | ReceiverRole | None = None
        self._address: Any = None  # of the sender; travels in the pickle
        self._strategy = WeightStrategy(strategy)
        self.sync = sync
        self.timeout = timeout
        self.bind = bind
        self.checksum: bool | None = None
        self.metrics = SyncMetrics(self.name)

    # --- what a backend overrides ---

    @abstractmethod
    def create_transport(self, worker_idx: int | None = None) -> TransportBackend:
        """Return a new transport to (or in) worker ``worker_idx``. Called once per connection, at both ends."""

    def create_rendezvous(self) -> Rendezvous:
        """Return how workers find the sender; by default by the address in the pickled scheme, on one machine."""
        return SocketRendezvous()

    @property
    def acknowledges(self) -> bool:
        """Whether a finished ``send`` means that every worker has acknowledged the update."""
        return True

    @property
    def device(self) -> torch.device:
        """Where weights are packed."""
        return torch.device("cpu")

    def _uses_arena(self) -> bool:
        return self.arena

    def _transport_factory(self) -> Any:
        """Return the factory of transports; a subclass returns None if all its workers use the arena."""
        return self.create_transport

    def _make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None) -> Source:
        return Source(weights, self.strategy, device_map_fn=device_map_fn)

    # --- init: local, no communication ---

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | None = None,
        weights: Any = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: DeviceMap | None = None,
        num_workers: int | None = None,
        params_map: Mapping[int, Any] | None = None,
        pipes: Sequence[Any] | None = None,
    ) -> None:
        """Set up the trainer's end. Nothing is sent, and nothing is copied.

        Args:
            model_id: the model's name, and its path in ``context``.
            context: a collector, or any object that has the model.
            model: the model; read again by each ``send()`` without arguments.
            weights: instead of a model, its live weights; likewise read again.
            devices: one per worker (each worker moves weights to its own device).
            device_map_fn: ``(worker_idx, weights) -> weights`` for that worker.
            num_workers: how many there are; by default as many as ``devices``, ``params_map`` or the context's workers.
            params_map: ``{worker_idx: weights}``, for workers that are to have different ones.
            pipes: the older API's, one to each worker: see ``wsync.legacy``.

        Raises:
            RuntimeError: the scheme is initialised already.
            TypeError: an argument has a wrong type.
            ValueError: arguments contradict one another.
        """
        self._require_fresh()
        sources = {"model": model, "weights": weights, "params_map": params_map}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give one of model, weights and params_map, not {' and '.join(given)}")
        from wsync.legacy.pipes import invite_all, pipes_of

        pipes = pipes_of(context, pipes)
        if pipes:
            num_workers = single_count({"num_workers": num_workers, "pipes": len(pipes)})
        workers = context.remote_workers if isinstance(context, CollectorContext) else ()
        count = agreed_count(num_workers, devices, params_map, workers)
        if model is None and not given and context is not None:
            model = find_or_none(context, model_id)
        # Process descriptors, to notice deaths early.
        sentinels = {worker.worker_idx: worker.sentinel for worker in workers}
        source = self._make_source(model_id, params_map or (model if weights is None else weights), device_map_fn)
        sender, channel = self._open_sender(source, count)
        self._role = SenderRole(model_id, context, model, sender, channel, self._address, sentinels)
        close_at_exit(channel)  # by a finalizer that runs before multiprocessing waits for its child processes
        if pipes:
            invite_all(self, pipes)

    def _open_sender(self, source: Source, num_workers: int) -> tuple[Sender, WorkerChannel]:
        """Begin to listen for workers; from here on there is something to release."""
        connections, self._address = self.create_rendezvous().open()
        channel = WorkerChannel(
            connections,
            num_workers,
            self._transport_factory(),
            self._strategy,
            arena=self._uses_arena(),
            retains=self.binds_arena,  # a bound model uses its slot until the next update
            checksum=self.checksum,
            device=self.device,
        )
        sender = Sender(
            channel,
            source,
            num_workers,
            self.timeout,
            delivers_at_connect=self.delivers_at_connect,
            finishes_on_publish=not self.acknowledges,
            record=self.metrics.record,
        )
        return sender, channel

    def init_on_receiver(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
    ) -> None:
        """Set up a worker's end. Nothing is received yet.

        Args:
            model_id: the model's name, and its path in ``context``.
            context: an object that has the model. If it has workers of its own (a ``CascadingContext``),
                ``context.cascade_weights(model_id)`` is called after each update.
            model: the model itself. If its parameters are in memory shared with another process, they are copied first.
            worker_idx: this worker's index; otherwise ``connect`` is given it.

        Raises:
            RuntimeError: the scheme was never initialised on a sender, or is initialised here already.
            LookupError, TypeError: the context has no such model.
            ValueError: neither a model nor a context; or a context that passes updates on, with a scheme that has
                no acknowledged sends.
        """
        self._require_fresh_receiver()
        rendezvous = self.create_rendezvous()
        if self._address is None and not rendezvous.can_look_up():
            raise RuntimeError("initialise this scheme on the sender first, then pickle or fork it to the worker")
        if model is None:
            if context is None:
                raise ValueError(f"init_on_receiver('{model_id}') needs the model, or a context that has it")
            model = find_model(context, model_id)
        cascade = (lambda: context.cascade_weights(model_id)) if isinstance(context, CascadingContext) else None
        if cascade is not None and not self.acknowledges:
            raise ValueError(
                f"the context of '{model_id}' passes updates on to workers of its own, so a finished send needs their "
                "acknowledgements: give the scheme acknowledge='installed'"
            )
        address = self._address
        channel = SenderChannel(
            lambda worker, deadline: rendezvous.dial(address, model_id, worker, deadline),
            self._transport_factory(),
            self._strategy,
            arena=self._uses_arena(),
            binds_arena=self.binds_arena and self.bind,  # to slots of the arena
            binds_buffers=self.bind,  # to the receive buffers of a transport
            timeout=self.timeout,
            connected=rendezvous.connected,
        )
        receiver = Receiver(model, self._strategy, channel, cascade=cascade)
        self._role = ReceiverRole(model_id, context, model, receiver, worker_idx)

    def init_in_process(self, model_id: str, model: nn.Module, source: Any = None) -> None:
        """Set up and connect both ends in this process. The thread that calls ``send`` installs, inside the gate.

        Args:
            model_id: the model's name.
            model: the one that acts and is updated.
            source: model or weights that ``send()`` without arguments reads; the current ones are installed at once.

        Raises:
            RuntimeError: the scheme is initialised already.
            LayoutMismatch: the source does not fit the model.
        """
        self._require_fresh()
        channel = InProcessChannel(connect=lambda: receiver.connect(0, self.timeout))
        receiver = Receiver(model, self._strategy, channel)
        source = self._make_source(model_id, source, None)
        sender = Sender(channel, source, 1, self.timeout, record=self.metrics.record)
        sender.connect(None, {})
        self._role = SenderRole(model_id, None, model, sender, channel, None, {}, receiver)

    def _require_fresh(self) -> None:
        require_fresh(self._role)

    def _require_fresh_receiver(self) -> None:
        if isinstance(self._role, SenderRole) and self._role.inherited:
            self._role.channel.close()  # a forked child has inherited the trainer's end
            self._role = None
        self._require_fresh()

    # --- connect, update, shut down ---

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Wait for the other end, which calls this as well; delivers the first weights, if the sender has any.

        Args:
            worker_idx: on a receiver, this worker's index.
            weights: on the sender, first weights instead of the model's.

        Raises:
            NotConnected: not initialised; or the sender is gone, or refused this worker.
            SyncTimeout: the other end did not come within ``timeout``; names the missing workers.
            WorkerDied, WorkerFailed: on the sender, naming the worker.
            LayoutMismatch: on the receiver, if its model is not like the sender's.
            RuntimeError: on a receiver that is connected already. A sender may connect again: workers that were late,
                or that take the place of others, are accepted.
        """
        role = self._role
        require_own(role)
        if isinstance(role, SenderRole):
            if not role.sender.connected and role.address is not None:
                self.create_rendezvous().announce(role.address, role.model_id, deadline_in(self.timeout))
            role.sender.connect(weights, role.sentinels)
        elif isinstance(role, ReceiverRole):
            index = role.worker_idx if worker_idx is None else worker_idx
            if index is None:
                raise ValueError("worker_idx is missing: give it to init_on_receiver() or connect()")
            role.receiver.connect(index, self.timeout)
            if not self.acknowledges:
                role.receiver.act_through_gate_only()
        else:
            raise NotConnected("call init_on_sender() or init_on_receiver() before connect(), also after shutdown()")

    def synchronize_weights(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Connect: the older name of ``connect``, which delivers the first weights."""
        self.connect(worker_idx=worker_idx, weights=weights)

    def disconnect(self, worker_idx: int) -> None:
        """On the sender: treat a worker as dead: stop sending to it.

        The newest update sent to all workers is delivered to its replacement when that connects: see ``readmit``.
        """
        self._sender_role("disconnect").sender.disconnect(worker_idx)

    def readmit(self, worker_idx: int, sentinel: int | None = None, timeout: float | None = None) -> None:
        """On the sender: accept a replacement, which calls ``connect``, for a worker that has died.

        It gets the version last sent to its index, by itself or to all workers, even if sent while no worker had that
        index. Other workers are not affected. A worker still connected under this index is disconnected first.

        Args:
            worker_idx: the index of the dead worker, which the replacement takes over.
            sentinel: a descriptor that becomes readable when the replacement's process ends.
            timeout: seconds; None for the scheme's.

        Raises:
            SyncTimeout, WorkerDied, WorkerFailed: it did not connect, or not with these weights.
        """
        self._sender_role("readmit").sender.readmit(worker_idx, sentinel, timeout)

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> SyncReport | None:
        """Deliver an update. When this returns, every forward that starts in a worker uses it.

        Args:
            weights: module, TensorDict, state dict, or ``{worker: any of these}``; None reads the model (or the
                weights, or each worker's own) given at init.
            worker_ids: one, several, or (None) all workers.

        Returns:
            What it cost; None if ``sync=False``, which does not wait.

        Raises:
            NotConnected: before ``connect``; or no worker is left; or there are no weights to send.
            LayoutMismatch: weights that do not fit; no worker has any of them.
            ValueError: an unknown worker.
            WorkerDied, WorkerFailed, SyncTimeout: names each worker that lacks the update, and why; the others have it.
        """
        role = self._role
        if not isinstance(role, SenderRole):
            role = self._sender_role("send")
        return role.sender.send(weights, worker_ids, self.sync)

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send without waiting; ``wait_async`` waits.

        If a newer update is sent before a worker has taken this one, the worker skips this one.
        """
        self._sender_role("send_async").sender.send(weights, worker_ids, wait=False)

    def wait_async(self) -> SyncReport | None:
        """Wait until everything that was sent without waiting is installed.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: errors of the oldest failed update; call again for the rest.
        """
        return self._sender_role("wait_async").sender.wait()

    def receive(self, timeout: float | None = None) -> Any | None:
        """Wait for a version newer than the one the previous ``receive`` returned; the first call: than ``connect``'s.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            The model's weights, of one version; None at the timeout. They are not copied, and a later update may be
            written into the same memory.

        Raises:
            NotConnected: the sender is gone.
            RuntimeError: called inside a forward, or ``wsync.gate()``, where nothing is installed.
        """
        return self._receiver_role("receive").receiver.receive(timeout)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply ``weights`` to this end's model, inside the gate, without sending anything.

        Raises:
            LayoutMismatch: they do not fit; nothing was applied.
            NotConnected: this end has no model; or this is a forked child of the process that initialised it.
        """
        role, model = self._role, self.model
        require_own(role)
        if model is None:
            raise NotConnected("this end has no model to apply weights to")
        with process_gate().hold():
            if isinstance(role, ReceiverRole):
                role.receiver.own_memory(keep=True)  # its current memory is shared with other workers
            self.strategy.apply_weights(model, weights, inplace=inplace)

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: WeightStrategy | None = None, context: Any = None
    ) -> Any:
        """Return what ``send(weights)`` would send, in the strategy's format, ``{worker: …}`` where workers differ.

        Changes nothing, and calls no ``device_map_fn``.

        Raises:
            NotConnected: no weights were given, and there is no model to take them from.
        """
        if weights is None and context is not None:
            weights = find_model(context, model_id)
        elif weights is None:
            weights = self._sender_role("prepare_weights").sender.source.weights
        if weights is None:
            raise NotConnected(f"there are no weights of '{model_id}' to prepare: give weights or a context")
        chosen = strategy or self.strategy
        by_worker = per_worker(weights)
        if by_worker is not None:
            return {worker: chosen.extract_weights(own) for worker, own in by_worker.items()}
        return chosen.extract_weights(weights)

    def shutdown(self) -> None:
        """Release connections, memory and threads. Idempotent. A worker's model keeps its weights, in its own memory.

        Raises:
            RuntimeError: in a worker, inside the gate; would deadlock: the receiver thread may be waiting for it.
        """
        role = self._role
        if isinstance(role, SenderRole):
            if role.in_process_receiver is not None:
                role.in_process_receiver.close()
            role.sender.close()
        elif isinstance(role, ReceiverRole):
            if process_gate().held_here:
                raise RuntimeError("call shutdown() outside any forward and any wsync.gate() block")
            if role.background_connect is not None:
                role.background_connect.close()
            role.receiver.close()
        self._role = self._address = None

    # --- what can be asked of a scheme; the role is read once: another thread may shut the scheme down ---

    @property
    def context(self) -> Any:
        """The collector (or other context) of this end, if any."""
        role = self._role
        return role.context if role else None

    @property
    def model(self) -> Any:
        """The model of this end, if it has one."""
        role = self._role
        return role.model if role else None

    @property
    def model_id(self) -> str | None:
        """The model's name; None before init."""
        role = self._role
        return role.model_id if role else None

    @property
    def strategy(self) -> WeightStrategy:
        """The format in which weights are returned. Chosen when the scheme is made.

        Raises:
            AttributeError: if assigned: another one would have no effect on what is sent.
        """
        return self._strategy

    @strategy.setter
    def strategy(self, _: object) -> NoReturn:
        raise AttributeError("the strategy is chosen when the scheme is made; device_map_fn changes what is sent")

    @property
    def timeout(self) -> float | None:
        """Seconds for ``connect`` and ``send``, from the next one on; None for no limit.

        Raises:
            ValueError: if assigned: neither a number above 0 nor None.
        """
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout is a number of seconds above 0, or None, not {seconds}")
        self._timeout = seconds = as_timeout(seconds)
        role = self._role
        if isinstance(role, SenderRole):
            role.sender.timeout = seconds

    @property
    def worker_idx(self) -> int | None:
        """This worker's index; None on the sender."""
        role = self._role
        if not isinstance(role, ReceiverRole):
            return None
        connected = role.receiver.worker_idx
        return connected if connected >= 0 else role.worker_idx

    @property
    def num_workers(self) -> int:
        """The number of workers; 0 before init."""
        role = self._role
        return role.sender.num_workers if isinstance(role, SenderRole) else 0

    @property
    def version(self) -> int:
        """The newest version sent; on a receiver, the one that the model has. 0 before the first."""
        role = self._role
        if isinstance(role, SenderRole):
            return role.sender.version
        return role.receiver.version if role else 0

    @property
    def installed_version(self) -> int:
        """The version of this process's model, 0 before the first; always 0 on a sender with workers elsewhere."""
        role = self._role
        if isinstance(role, SenderRole):
            return role.in_process_receiver.version if role.in_process_receiver else 0
        return role.receiver.version if role else 0

    @property
    def weights(self) -> Any:
        """This end's weights, live, in the strategy's format; None if there are none yet."""
        role = self._role
        if isinstance(role, ReceiverRole):
            return process_gate().call(role.receiver.weights)
        source = role.sender.source.weights if role else None
        if source is None:
            return None
        by_worker = per_worker(source)
        if by_worker is not None:
            return {worker: self.strategy.extract_weights(weights) for worker, weights in by_worker.items()}
        return self.strategy.express(snapshot(source))

    @property
    def sender_transports(self) -> dict[int, TransportBackend]:
        """On the sender, the transport to each worker; empty on a receiver."""
        role = self._role
        if not isinstance(role, SenderRole):
            return {}
        return {i: SenderTransport(role.sender, self.connect, [i], role.model_id) for i in range(self.num_workers)}

    @property
    def shared_transport(self) -> TransportBackend | None:
        """On the sender, one transport to all workers; None on a receiver."""
        role = self._role
        return SenderTransport(role.sender, self.connect, None, role.model_id) if isinstance(role, SenderRole) else None

    @property
    def receiver_transport(self) -> TransportBackend | None:
        """On a receiver, the transport from the sender; None on a sender."""
        role = self._role
        return ReceiverTransport(role.receiver, self.connect) if isinstance(role, ReceiverRole) else None

    @property
    def sender(self) -> Sender:
        """The send path: for ``synchronize``."""
        return self._sender_role("sender").sender

    def _sender_role(self, what: str) -> SenderRole:
        return sender_role(self._role, what)

    def _receiver_role(self, what: str) -> ReceiverRole:
        return receiver_role(self._role, what)

    # --- the older API: see wsync.legacy ---

    def init_on_worker(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        pipe: Any = None,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
    ) -> None:
        """Set up and begin to connect a worker, without waiting for the sender: see ``wsync.legacy.api``."""
        from wsync.legacy.api import init_on_worker

        init_on_worker(self, model_id, context, pipe=pipe, model=model, worker_idx=worker_idx)

    def get_sender(self) -> WeightSender:
        """Return the older API's sender; ``NotConnected`` before ``init_on_sender``."""
        self._sender_role("get_sender")
        return self.create_sender()

    def get_receiver(self) -> WeightReceiver:
        """Return the older API's receiver; ``NotConnected`` before ``init_on_worker``."""
        self._receiver_role("get_receiver")
        return self.create_receiver()

    def create_sender(self) -> WeightSender:
        """Return the older API's sender; may come before ``init_on_sender``."""
        from wsync.legacy.api import WeightSender

        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """Return the older API's receiver; may come before ``init_on_worker``."""
        from wsync.legacy.api import WeightReceiver

        return WeightReceiver(self)

    # --- pickles, context manager, construction by name ---

    def __getstate__(self) -> dict[str, Any]:
        """Return the options and the sender's address: no weights, no model, no role."""
        return {**self.__dict__, "_role": None, "metrics": SyncMetrics(self.name)}

    def __enter__(self) -> Self:
        """Return the scheme; it is shut down at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down."""
        self.shutdown()

    @classmethod
    def from_backend(cls, name: str, **options: Any) -> WeightSyncScheme:
        """Return the scheme of the backend called ``name`` (``wsync.registry``), with ``options``.

        Raises:
            ValueError: there is no such backend; lists those that there are.
        """
        return load_backend(name)(**options)
