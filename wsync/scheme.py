"""A scheme: what happens to one model's weights over its life, on either end.

    trainer   init_on_sender ─→ (pickled to the workers) ─→ connect ─→ send, send, … ─→ shutdown
    worker    init_on_receiver ─→ connect ─→ updates arrive, between two forwards ─→ shutdown

A backend is a subclass that names a transport (``create_transport``) and, where workers do not connect by the address
in the pickled scheme, a rendezvous (``create_rendezvous``).

The *arena* is the shared-memory slots of ``wsync/shm/arena.py``. The *gate* (``wsync/gate.py``) is a worker process's
lock around every forward of a synchronised model; updates are installed only inside it. In a worker the *acting thread*
runs the forwards; the *receiver thread*, one per process, reads the senders' messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, Self

import torch
from tensordict import TensorDictBase
from torch import nn

from wsync import assembly
from wsync.control.processes import Process, Processes, watched
from wsync.deadlines import as_timeout
from wsync.errors import NotConnected
from wsync.legacy.api import WeightReceiver, WeightSender, init_on_worker
from wsync.legacy.pipes import invite_all, pipes_of
from wsync.metrics import SyncMetrics
from wsync.options import full_signature
from wsync.receiving.protocols import RequestChannel
from wsync.registry import load_backend
from wsync.rendezvous import Rendezvous, SocketRendezvous
from wsync.roles import ReceiverRole, Role, SenderRole, close_without_shutdown, prepared_weights
from wsync.scheme_transports import ReceiverTransport, SenderTransport
from wsync.sender import Sender
from wsync.sending.counting import agreed_count
from wsync.sending.protocols import SendChannel
from wsync.sending.source import DeviceMap, Source
from wsync.transforms.chain import Transform, compose
from wsync.transport import FlatTransport, TransportBackend
from wsync.types import CollectorContext, SyncReport
from wsync.weights.strategy import Format, WeightStrategy
from wsync.weights.targets import Load


class WeightSyncScheme(ABC):
    """Carries one model's weights from a trainer to its workers.

    Args:
        strategy: the format of weights that ``receive`` and ``weights`` return and that a transport is given,
            ``"tensordict"`` or ``"state_dict"``. ``send`` takes both.
        sync: whether ``send`` waits until every worker uses the update; otherwise ``wait_async`` waits for that.
        timeout: seconds for ``connect`` and for ``send``; None for no limit.
        bind: whether a worker's parameters may point directly into received, possibly shared memory. False for a worker
            that writes to its parameters, e.g. trains: it would corrupt the shared copy.
        send_transform: what is done to weights before they are sent: a function, or a list (``wsync.transforms``).
            Called by the thread that calls ``send``.
        receive_transform: what is done to them in the worker, before they are installed; picklable. Called inside the
            gate, by the thread that installs.
        initiator: ``"sender"``: ``send`` has workers install each version. ``"receiver"``: it only makes the version
            available, and a worker installs the newest one when it calls ``pull``. With either value ``connect``
            installs the first weights, if the sender has any by then.
        max_staleness: with ``initiator="receiver"``: a worker whose model is more than this many versions behind
            fetches the newest before its next forward; None for no limit.

    Attributes:
        metrics: what each update has cost.
        send_transform, receive_transform: as given; may be assigned before init.
    """

    name: ClassVar[str]
    """The backend's name: in configs, in reports."""
    collectors: ClassVar[tuple[str, ...]] = ("multi_sync", "multi_async", "single")
    """Values of ``collector=`` in ``train.py`` that work with this scheme, the default first; empty if none does."""
    sends_weights: ClassVar[bool] = True
    """Whether anything is sent at all."""
    sender_driven: ClassVar[bool] = False
    """Whether only the sender's end is set up by the user: its ``connect`` also sets up and connects the receivers.

    The receivers are then the Ray actors of its ``context`` (a ``RayModuleTransform``), not a collector's workers.
    """
    delivers_at_connect: ClassVar[bool] = True
    """Whether the first weights are delivered by ``connect``; otherwise by the first ``send``."""
    arena: ClassVar[bool] = False
    """Whether workers on the sender's machine take weights from the arena instead of the transport."""
    binds_arena: ClassVar[bool] = False
    """Whether models of workers that use the arena are bound to its slots; otherwise the weights are copied out."""

    def __init__(
        self,
        strategy: Format = "tensordict",
        sync: bool = True,
        *,
        timeout: float | None = 60.0,
        bind: bool = True,
        send_transform: Transform | Sequence[Transform] | None = None,
        receive_transform: Transform | Sequence[Transform] | None = None,
        initiator: Literal["sender", "receiver"] = "sender",
        max_staleness: int | None = None,
    ) -> None:
        if initiator not in ("sender", "receiver"):
            raise ValueError(f"initiator is 'sender' or 'receiver', not {initiator!r}")
        if max_staleness is not None and (initiator == "sender" or max_staleness < 0):
            raise ValueError("max_staleness is a number of versions, 0 or more, and needs initiator='receiver'")
        self.initiator: Literal["sender", "receiver"] = initiator
        self.max_staleness = max_staleness
        self._role = Role()
        self._address: Any = None  # of the sender; travels in the pickle
        self._sent_model_id: str | None = None  # the model that the sender at this address sends
        self._strategy = WeightStrategy(strategy)
        self.sync = sync
        self.timeout = timeout
        self.bind = bind
        self.send_transform = send_transform
        self.receive_transform = receive_transform
        self.checksum: bool | None = None  # whether updates have one; None: only those that travel by a transport
        self.metrics = SyncMetrics(self.name)

    def __init_subclass__(cls) -> None:
        """Have ``inspect.signature`` name every option of a scheme."""
        cls.__signature__ = full_signature(cls)

    # --- what a backend overrides ---

    @abstractmethod
    def create_transport(self, worker_idx: int | None = None) -> TransportBackend | FlatTransport:
        """Return a new transport to (or in) worker ``worker_idx``. Called once per connection, at either end.

        By the thread in ``connect`` or ``readmit``; in a worker with ``init_on_worker``, by the receiver thread.
        """

    def create_rendezvous(self) -> Rendezvous:
        """Return how workers find the sender; by default by the address in the pickled scheme, on one machine."""
        return SocketRendezvous()

    @property
    def acknowledges(self) -> bool:
        """Whether a finished ``send`` means that every worker has acknowledged the update."""
        return self.initiator == "sender"

    @property
    def device(self) -> torch.device:
        """Where weights are packed."""
        return torch.device("cpu")

    def _uses_arena(self) -> bool:
        """Return whether this instance uses the arena; overridden where an option turns it off."""
        return self.arena

    def _workers_by_option(self) -> Mapping[str, int]:
        """Return ``{option: number of workers}`` for options of this scheme that imply the number, e.g. ``urls``."""
        return {}

    def _transport_factory(self) -> Any:
        """Return the factory of transports; a subclass returns None if all its workers use the arena."""
        return self.create_transport

    def _make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None) -> Source:
        return Source(
            weights,
            self.strategy,
            device_map_fn=device_map_fn,
            transform=compose(self.send_transform, "send_transform"),
        )

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
        """Set up the trainer's end. No weights are sent or copied; with ``pipes``, workers are told where to connect.

        Args:
            model_id: the model's name, and its path in ``context``.
            context: a collector, or any object that has the model.
            model: the model; read again by each ``send()`` without arguments.
            weights: instead of a model, its live weights; likewise read again.
            devices: one per worker; only their number is used.
            device_map_fn: ``(worker_idx, weights) -> weights`` for that worker.
            num_workers: how many there are; by default as many as ``devices``, ``params_map`` or the context's workers.
            params_map: ``{worker_idx: weights}``, for workers that are to have different ones.
            pipes: the older API's, one to each worker: see ``wsync.legacy``.

        Raises:
            RuntimeError: the scheme is initialised already.
            TypeError: an argument has a wrong type.
            ValueError: arguments contradict one another.
        """
        self._role.require_uninitialised()
        model, default = assembly.model_and_weights(context, model_id, model, weights, params_map)
        pipes = pipes_of(context, pipes)
        workers = context.remote_workers if isinstance(context, CollectorContext) else ()
        options = {**self._workers_by_option(), **({"pipes": len(pipes)} if pipes else {})}
        count = agreed_count(num_workers, devices, params_map, workers, options)
        sender, channel = self._open_sender(model_id, self._make_source(model_id, default, device_map_fn), count)
        self._role = SenderRole(
            model_id=model_id,
            context=context,
            model=model,
            sender=sender,
            channel=channel,
            address=self._address,
            sentinels={worker.worker_idx: worker.sentinel for worker in workers},
        )
        close_without_shutdown(self._role)  # closes the channel if shutdown() is never called
        if pipes:
            invite_all(self, pipes)  # tell each worker through its pipe where to connect

    def _open_sender(self, model_id: str, source: Source, num_workers: int) -> tuple[Sender, SendChannel]:
        """Open the listening socket, and set ``_address`` and ``_sent_model_id``."""
        connections, self._address = self.create_rendezvous().open()
        self._sent_model_id = model_id
        return assembly.make_sender(self, source, num_workers, connections)

    def init_on_receiver(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        load: Load | None = None,
        chunk_bytes: int | None = None,
        worker_idx: int | None = None,
    ) -> None:
        """Set up a worker's end. Nothing is received yet.

        Args:
            model_id: the model's name, and its path in ``context``.
            context: an object that has the model. If it has a method ``cascade_weights``, because it has workers of its
                own, ``context.cascade_weights(model_id)`` is called after each update, before it is acknowledged:
                outside the gate, by the receiver thread (with RPC: of the incoming call), or the thread in ``connect``
                or ``pull``. If it only has ``update_policy_weights_``, that is called, with
                ``(weights, model_id=model_id)``.
            model: the model itself, or a mapping of tensors into which weights are copied. If a module's parameters are
                in memory shared with another process, they are copied first.
            load: for an inference engine: called inside the gate, by the acting or receiver thread (the first to enter
                it), with an iterator over the ``(name, tensor)`` pairs of each version; the tensors are valid during
                the call. ``model`` is then optional; its forwards are gated.
            chunk_bytes: call ``load`` several times for one version, with at most so many bytes (or one tensor) each.
            worker_idx: this worker's index; otherwise ``connect`` is given it.

        Raises:
            RuntimeError: the scheme was never initialised on a sender, or is initialised here already.
            LookupError, TypeError: the context has no such model.
            ValueError: another ``model_id`` than the sender's; neither a model, a context nor ``load``; or a context
                with ``cascade_weights`` and ``SharedMemWeightSyncScheme(acknowledge="published")``, whose ``send`` does
                not wait for workers.
        """
        self._release_inherited_end()
        if self._sent_model_id not in (None, model_id):
            raise ValueError(f"the sender of this scheme sends '{self._sent_model_id}', not '{model_id}'")
        model, receiver = assembly.make_receiver(self, model_id, context, model, load, chunk_bytes)
        self._role = ReceiverRole(
            model_id=model_id, context=context, model=model, receiver=receiver, given_idx=worker_idx
        )

    def _open_receiver(self, model_id: str) -> RequestChannel:
        """Return the worker's end of the connection, which ``connect`` will make."""
        return assembly.make_receive_channel(self, model_id)

    def init_in_process(self, model_id: str, model: nn.Module, source: Any = None) -> None:
        """Set up and connect both ends in this process. The thread that calls ``send`` installs, inside the gate.

        Args:
            model_id: the model's name.
            model: runs the forwards; updates are installed in it.
            source: model or weights that ``send()`` without arguments reads; installed at once, as version 1.

        Raises:
            RuntimeError: the scheme is initialised already.
            LayoutMismatch: the source does not fit the model.
        """
        self._role.require_uninitialised()
        self._role = assembly.connect_in_process(self, model_id, model, source)

    def _release_inherited_end(self) -> None:
        """Release the trainer's end that a forked child has inherited; require that the scheme is not initialised."""
        if isinstance(self._role, SenderRole) and self._role.inherited:
            self._role.channel.close()
            self._role = Role()
        self._role.require_uninitialised()

    # --- connect, update, shut down ---

    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, processes: Processes | None = None
    ) -> None:
        """Wait for the other end, which calls this as well; delivers the first weights, if the sender has any.

        A sender may call it again: workers that were late, or that take the place of others, are accepted.

        Args:
            worker_idx: on a receiver, this worker's index.
            weights: on the sender, first weights instead of the model's.
            processes: on the sender, the workers' processes, so that one that ends before it has connected is an error
                at once, with its exit code: a list in the order of the workers' indices, or ``{worker_idx: process}``.
                Each is a ``multiprocessing.Process``, a ``subprocess.Popen`` or an integer. An integer that is an open
                pipe, socket, eventfd or pidfd of this process is a descriptor that becomes readable when the worker's
                process ends (``Process.sentinel``, a pidfd); any other integer is a process id of this machine.

        Raises:
            NotConnected: not initialised; or the sender is gone, or refused this worker.
            SyncTimeout: the other end did not come within ``timeout``; names the missing workers.
            WorkerDied, WorkerFailed: on the sender, naming the worker.
            LayoutMismatch: on the receiver, if its model is not like the sender's.
            TypeError, ValueError: ``processes`` has no such form, or an integer in it could be either.
            RuntimeError: on a receiver that is connected already.
        """
        role = self._role
        role.require_own()
        if isinstance(role, SenderRole):
            role.connect(self.create_rendezvous, weights, processes, self.timeout)
        elif isinstance(role, ReceiverRole):
            role.connect(worker_idx, processes, self.timeout, acknowledges=self.acknowledges)
        else:
            raise NotConnected(
                "connect() needs init_on_sender() or init_on_receiver() first; after shutdown(), initialise the scheme "
                "again"
            )

    def synchronize_weights(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Connect: the older name of ``connect``, which delivers the first weights."""
        self.connect(worker_idx=worker_idx, weights=weights)

    def disconnect(self, worker_idx: int) -> None:
        """On the sender: treat a worker as dead, and send it nothing more; ``readmit`` accepts its replacement."""
        self._role.as_sender("disconnect").sender.disconnect(worker_idx)

    def readmit(self, worker_idx: int, process: Process | None = None, timeout: float | None = None) -> None:
        """On the sender: accept the process that replaces a dead worker; that process calls ``connect`` meanwhile.

        It gets the newest update that was sent to its index, also one that was sent while no worker had this index.
        Other workers are not affected. A worker that is still connected under this index is disconnected first.

        Args:
            worker_idx: the index of the dead worker, which the replacement takes over.
            process: the replacement's, so that its end before it has connected is an error at once: see ``connect``.
            timeout: seconds; None for the scheme's.

        Raises:
            SyncTimeout, WorkerDied, WorkerFailed: it did not connect, or could not install the weights.
            TypeError: ``process`` is not a process.
            ValueError: there is no such worker.
        """
        sender = self._role.as_sender("readmit").sender
        with watched(None if process is None else {worker_idx: process}, sender.num_workers) as sentinels:
            sender.readmit(worker_idx, sentinels.get(worker_idx), timeout)

    def continue_from(self, version: int) -> None:
        """On the sender, in a resumed run: number the next update ``version + 1``, unless a newer one was sent.

        Raises:
            ValueError: it is not a version: negative, or too large.
        """
        self._role.as_sender("continue_from").sender.continue_from(version)

    def send(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, partial: bool = False
    ) -> SyncReport | None:
        """Deliver an update. When this returns, every forward that starts later in a worker uses it.

        With ``sync=False`` this returns at once. With ``initiator="receiver"`` it makes the version available, and with
        the backend ``store`` it writes a version that readers will find.

        Args:
            weights: module, TensorDict, state dict, or ``{worker: any of these}``; None reads the model (or the
                weights, or each worker's own) given at init.
            worker_ids: one, several, or (None) all workers.
            partial: whether ``weights`` are a part of the model; the rest keeps the values that were sent last.

        Returns:
            What it cost; None if ``sync=False``, which does not wait.

        Raises:
            NotConnected: before ``connect``; or no worker is left; or there are no weights to send.
            LayoutMismatch: the weights do not fit the model; no worker's model was changed.
            ValueError: an unknown worker; or ``partial`` with ``worker_ids``, or when workers have different weights.
            WorkerDied, WorkerFailed, SyncTimeout: names each worker that lacks the update, and why; the others have it.
        """
        role = self._role
        if not isinstance(role, SenderRole):  # tested here as well: saves a call per update
            role = role.as_sender("send")
        return role.sender.send(weights, worker_ids, self.sync, partial)

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send without waiting; ``wait_async`` waits. A worker skips it if a newer one is sent before it was taken."""
        self._role.as_sender("send_async").sender.send(weights, worker_ids, wait=False)

    def wait_async(self) -> SyncReport | None:
        """Wait until everything that was sent without waiting is installed.

        Returns:
            The report of the newest of these updates; None if there was none.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: errors of the oldest failed update; call again for the rest.
        """
        return self._role.as_sender("wait_async").sender.wait()

    def receive(self, timeout: float | None = None) -> Any | None:
        """Wait for a version newer than the last one returned; at first, newer than the one ``connect`` delivered.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            The model's weights, of one version. They are not copied, and a later update may be written into the same
            memory. None at the timeout, and when the sender (or this end) has shut down: ``finished`` is then true.

        Raises:
            NotConnected: the sender died, ended without ``shutdown``, or has disconnected this worker; or an earlier
                call has already returned None because of a shutdown.
            RuntimeError: called inside a forward, or ``wsync.gate()``, where nothing is installed.
        """
        return self._role.as_receiver("receive").receiver.receive(timeout)

    def pull(self, timeout: float | None = None) -> int:
        """On a receiver: install the newest version that can be had now; return the model's version.

        Args:
            timeout: seconds to wait for it, or for the first version; None for no limit.

        Raises:
            NotConnected: before ``connect``; or the sender is gone and there has been no version.
            SyncTimeout: there is no version yet, or the sender did not send it in time.
            RuntimeError: called inside a forward, or ``wsync.gate()``.
        """
        return self._role.as_receiver("pull").receiver.pull(timeout)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply ``weights`` to this end's model, inside the gate, without sending anything.

        Raises:
            LayoutMismatch: they do not fit; nothing was applied.
            NotConnected: this end has no model; or this is a forked child of the process that initialised it.
        """
        self._role.apply_weights(self.strategy, weights, inplace)

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: WeightStrategy | None = None, context: Any = None
    ) -> Any:
        """Return ``weights`` in the strategy's format, before ``device_map_fn`` and ``send_transform`` are applied.

        ``{worker: weights}`` where workers have different ones. Nothing is sent, and nothing is changed.

        Raises:
            NotConnected: no weights were given, and there is no model to take them from.
        """
        return prepared_weights(self._role, weights, model_id, strategy or self.strategy, context)

    def shutdown(self) -> None:
        """Release connections, memory and threads. Idempotent. A worker's model keeps its weights, in its own memory.

        Updates that were sent without waiting may not arrive any more: call ``wait_async`` first. On the sender this
        waits, up to five seconds in all, until the workers have read earlier messages.

        Raises:
            RuntimeError: in a worker, inside the gate: the receiver thread may wait for it, so this would deadlock.
        """
        role, self._role = self._role, Role()
        try:
            role.close()
        except RuntimeError:
            self._role = role
            raise
        if isinstance(role, SenderRole):
            self._address = None  # a worker's stays valid: it may connect again

    # --- read-only state; each property reads the role once: another thread may shut the scheme down ---

    @property
    def is_sender(self) -> bool:
        """Whether this end is the sender's. False before init, and in a child forked from the sender's process."""
        role = self._role
        return role.side == "sender" and not role.inherited

    @property
    def context(self) -> Any:
        """The collector (or other context) of this end, if any."""
        return self._role.context

    @property
    def model(self) -> Any:
        """The model of this end, if it has one."""
        return self._role.model

    @property
    def model_id(self) -> str | None:
        """The model's name; None before init."""
        return self._role.model_id

    @property
    def strategy(self) -> WeightStrategy:
        """The format in which weights are returned; it cannot be assigned."""
        return self._strategy

    @strategy.setter
    def strategy(self, _: object) -> NoReturn:
        raise AttributeError("strategy cannot be changed after construction; device_map_fn changes what is sent")

    @property
    def timeout(self) -> float | None:
        """Seconds for ``connect`` and ``send``, from the next one on: a number above 0, or None for no limit."""
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
        return self._role.worker_idx

    @property
    def num_workers(self) -> int:
        """The number of workers; 0 before init."""
        return self._role.num_workers

    @property
    def version(self) -> int:
        """The newest version sent; on a receiver, the one that the model has. 0 before the first."""
        return self._role.version

    @property
    def installed_version(self) -> int:
        """On a receiver the same as ``version``. On a sender 0, unless ``init_in_process`` put the model here."""
        return self._role.installed_version

    @property
    def finished(self) -> bool:
        """On a receiver: whether either side has shut down, so that no more weights will come; False after a death."""
        return self._role.finished

    @property
    def weights(self) -> Any:
        """This end's weights, live, in the strategy's format; None if there are none yet."""
        return self._role.weights(self.strategy)

    @property
    def sender_transports(self) -> dict[int, TransportBackend]:
        """On the sender, ``{worker_idx: transport}``: ``send_weights`` calls ``send`` for that worker. Else empty."""
        role = self._role
        if not isinstance(role, SenderRole):
            return {}
        return {i: SenderTransport(role.sender, self.connect, [i], role.model_id) for i in range(role.num_workers)}

    @property
    def shared_transport(self) -> TransportBackend | None:
        """On the sender, one transport to all workers: see ``sender_transports``; None on a receiver."""
        role = self._role
        return SenderTransport(role.sender, self.connect, None, role.model_id) if isinstance(role, SenderRole) else None

    @property
    def receiver_transport(self) -> TransportBackend | None:
        """On a receiver, the transport from the sender; None on a sender."""
        role = self._role
        return ReceiverTransport(role.receiver, self.connect) if isinstance(role, ReceiverRole) else None

    @property
    def sender(self) -> Sender:
        """The send path; used by ``wsync.synchronize`` (``transaction.py``)."""
        return self._role.as_sender("sender").sender

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
        init_on_worker(self, model_id, context, pipe=pipe, model=model, worker_idx=worker_idx)

    def get_sender(self) -> WeightSender:
        """Return the older API's sender; ``NotConnected`` before ``init_on_sender``."""
        self._role.as_sender("get_sender")
        return self.create_sender()

    def get_receiver(self) -> WeightReceiver:
        """Return the older API's receiver; ``NotConnected`` before ``init_on_worker``."""
        self._role.as_receiver("get_receiver")
        return self.create_receiver()

    def create_sender(self) -> WeightSender:
        """Return the older API's sender; may come before ``init_on_sender``."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """Return the older API's receiver; may come before ``init_on_worker``."""
        return WeightReceiver(self)

    # --- pickles, context manager, construction by name ---

    def __getstate__(self) -> dict[str, Any]:
        """Return the options and the sender's address: no weights, no model, no role."""
        return {**self.__dict__, "_role": Role(), "metrics": SyncMetrics(self.name)}

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
