"""A scheme carries one model's weights from the trainer to its workers. The class is the same at both ends.

    trainer   init_on_sender ─→ (pickled to the workers) ─→ connect ─→ send, send, … ─→ shutdown
    worker    init_on_receiver ─→ connect ─→ updates arrive, between two forwards ─→ shutdown

A scheme hands each call on: to the ``Sender`` (``sender.py``) with an outlet, or to the ``Receiver`` (``receiver.py``)
with an inbox. A backend is a subclass that names what differs (``make_…``, ``create_…``).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from multiprocessing import util
from numbers import Integral
from typing import Any, ClassVar, Literal, Self

import torch
from tensordict import TensorDictBase
from torch import nn

from wsync import legacy
from wsync.control.auth import Address
from wsync.control.listen import Listener
from wsync.control.processes import Process, Processes
from wsync.control.rendezvous import Rendezvous
from wsync.control.session import Medium
from wsync.deadlines import as_timeout, deadline_in
from wsync.errors import NotConnected
from wsync.gate import process_gate
from wsync.inbox import InProcess, WorkerConnection
from wsync.media.transport import TransportMedium
from wsync.metrics import SyncMetrics, senders
from wsync.paths import CollectorContext, find_model, find_or_none
from wsync.receiver import Receiver
from wsync.registry import full_signature, load_backend
from wsync.sender import Sender
from wsync.transforms import Transform, compose, delta_of
from wsync.transport import SchemeTransport, TransportBackend
from wsync.update import Inbox, Outlet, SyncReport
from wsync.weights.source import DeviceMap, Source, extracted, per_worker
from wsync.weights.strategy import Format, WeightStrategy
from wsync.weights.targets import Destination, Load
from wsync.workers import Workers


class WeightSyncScheme:
    """Carries one model's weights from a trainer to its workers. Any thread may call its methods.

    Args:
        strategy: the format of weights that are returned and that a transport is given, ``"tensordict"`` or
            ``"state_dict"``. ``send`` takes both.
        sync: whether ``send`` waits for the workers; otherwise ``wait_async`` does.
        timeout: seconds for ``connect`` and for ``send``; None for no limit.
        bind: whether a worker's parameters may point into received, possibly shared memory. False for a worker that
            writes to its parameters, e.g. trains: it would corrupt the shared copy.
        gate: whether calls of a worker's model and of its public methods are gated; or the methods that are, beside the
            call of the model itself.
        send_transform: a function, or a list (``wsync.transforms``), that ``send`` applies to weights, in its thread.
        receive_transform: the same, before they are installed; picklable. Called inside the gate.
        initiator: ``"sender"``: ``send`` has workers install each version. ``"receiver"``: a worker installs the newest
            one when it calls ``pull``. ``connect`` installs the first weights with either value.
        max_staleness: with ``initiator="receiver"``: a worker that is more than this many versions behind fetches the
            newest before its next forward; None for no limit.

    Attributes:
        strategy: a ``WeightStrategy``.
        send_transform, receive_transform: as given; may be assigned before init.
        metrics: what each update has cost.
        model_id, context, model: what this end was initialised with; None before that.
        worker_idx: this worker's index; None on the sender.
    """

    __signature__: ClassVar[inspect.Signature]
    model_id: str | None = None
    context: Any = None
    model: Any = None
    worker_idx: int | None = None
    # What a backend sets: its name in reports; the values of ``collector=`` in `train.py` for it, the default first.
    name: ClassVar[str] = ""
    collectors: ClassVar[tuple[str, ...]] = ("multi_sync", "multi_async", "single")
    sends_weights: ClassVar[bool] = True  # false for the backend `none` alone
    sender_driven: ClassVar[bool] = False  # `connect` of the sender sets up the receivers, too: actors of its `context`
    delivers_at_connect: ClassVar[bool] = True  # else the first `send` delivers the first weights
    arena: bool = False  # workers on the sender's machine take weights from the arena (`shm/arena.py`)
    binds: ClassVar[bool] = False  # models of these workers are bound to its slots; else the weights are copied out

    def __init__(
        self,
        strategy: Format = "tensordict",
        sync: bool = True,
        *,
        timeout: float | None = 60.0,
        bind: bool = True,
        gate: bool | Sequence[str] = True,
        send_transform: Transform | Sequence[Transform] | None = None,
        receive_transform: Transform | Sequence[Transform] | None = None,
        initiator: Literal["sender", "receiver"] = "sender",
        max_staleness: int | None = None,
    ) -> None:
        if initiator not in ("sender", "receiver"):
            raise ValueError(f"initiator is 'sender' or 'receiver', not {initiator!r}")
        if max_staleness is not None and (initiator == "sender" or max_staleness < 0):
            raise ValueError("max_staleness is a number of versions, 0 or more, and needs initiator='receiver'")
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self.strategy = WeightStrategy(strategy)
        self.sync = sync
        self.timeout = timeout
        self.bind = bind
        self.gate = gate
        self.send_transform = send_transform
        self.receive_transform = receive_transform
        self.initiator: Literal["sender", "receiver"] = initiator
        self.max_staleness = max_staleness
        self.metrics = SyncMetrics(self.name or type(self).__name__)
        self._sentinels: dict[int, Any] = {}  # of a collector's worker processes
        self._address: Any = None  # of the sender; travels in the pickle
        self._sender_model_id: str | None = None  # the model that is sent from there
        self._listening: Address | None = None  # on the sender: what `announce` publishes
        self._registered: dict[str, TensorDictBase] = {}  # shared weights of the user's own, by model id
        self._pipes: list[Any] = []  # of the older API, by worker: see ``wsync.legacy``

    def __init_subclass__(cls, **options: Any) -> None:
        """Have ``inspect.signature`` name every option of a scheme."""
        super().__init_subclass__(**options)
        cls.__signature__ = full_signature(cls)

    def __getstate__(self) -> dict[str, Any]:
        """Return options and address, without weights, models and connections; for workers, no ``send_transform``."""
        own = ("_sender", "_receiver", "model_id", "context", "model", "worker_idx", "_listening")
        state = {**self.__dict__, **dict.fromkeys(own), "_sentinels": {}, "_registered": {}, "_pipes": []}
        state["metrics"] = SyncMetrics(self.metrics.scheme)
        return state if self._sender_model_id is None else {**state, "send_transform": None}

    # --- what a backend overrides ---

    def create_transport(self, worker_idx: Any = None) -> TransportBackend:
        """Return a new transport to (or in) worker ``worker_idx``; called once per connection, at either end.

        A backend of one's own overrides it. Here it is the scheme's own way to a worker, or (None) to all.
        """
        return legacy.transport_to(self, worker_idx)

    def create_rendezvous(self) -> Rendezvous:
        """Return how workers find the sender: here by the address in the pickled scheme."""
        return Rendezvous()

    def make_medium(self, worker_idx: int) -> Medium:
        """Return what carries the weights of one connection, at either end, where the arena does not."""
        if type(self).create_transport is WeightSyncScheme.create_transport:
            return Medium()
        return TransportMedium(weakref.proxy(self), worker_idx)  # a scheme that is dropped is closed

    def make_outlet(self, model_id: str, num_workers: int) -> Outlet:
        """Return what the sender publishes to: here workers that connect."""
        rendezvous, scheme = self.create_rendezvous(), weakref.proxy(self)  # a scheme that is dropped is closed
        listener = Listener(rendezvous.key(), "weights", model_id, rendezvous.host, rendezvous.port)
        self._listening = listener.address
        self._address = rendezvous.pickled(listener.address)
        return Workers(
            listener,
            num_workers,
            lambda worker: scheme.make_medium(worker),
            arena=self.arena,
            on_request=self.initiator == "receiver",
            delta=delta_of(self.send_transform),
            device=self.device,
        )

    def make_connection(self, model_id: str, receiver: Receiver) -> Inbox:
        """Return a receiver's way to its updates: here a connection to the sender."""
        rendezvous = self.create_rendezvous()
        if self._address is None and not rendezvous.can_look_up():
            raise RuntimeError("initialise this scheme on the sender first, then pickle or fork it to the worker")
        return WorkerConnection(rendezvous, self._address, model_id, receiver, self.make_medium, binds_arena=self.binds)

    def make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None, **options: Any) -> Source:
        """Return what the sender reads for each update."""
        transform = compose(self.send_transform, "send_transform")
        return Source(weights, self.strategy, device_map_fn=device_map_fn, transform=transform, **options)

    def implied_worker_counts(self) -> Mapping[str, int]:
        """Return the number of workers that an option implies, by its name: ``{"urls": 2}``."""
        return {}

    @property
    def acknowledges(self) -> bool:
        """Whether a finished ``send`` means that every worker has installed the update."""
        return self.initiator == "sender"

    @property
    def waits(self) -> bool:
        """Whether ``send`` waits for the workers: not where they fetch."""
        return self.initiator == "sender"

    @property
    def device(self) -> torch.device:
        """Where weights are packed."""
        return torch.device("cpu")

    # --- set up ---

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
        """Set up the trainer's end. No weights are sent or copied.

        Args:
            model_id: the model's name, and its dotted path in ``context``.
            context: a collector, or any object that has the model.
            model: the model; read again by each ``send()`` without arguments.
            weights: the weights themselves, instead of a model; likewise read again.
            devices: one per worker; only their number is used.
            device_map_fn: ``(worker_idx, weights) -> weights``: returns the weights of one worker, on any device.
                Called for each worker of an update, by the thread that sends it.
            num_workers: by default that of the other arguments that have one per worker; else 1.
            params_map: ``{worker_idx: weights}``, for workers that are to have different ones.
            pipes: of the older API, one to each worker, which is sent the sender's address.

        RuntimeError: initialised already. TypeError, ValueError: a wrong argument; or they contradict one another.
        """
        self._require_uninitialised()
        sources = {"model": model, "weights": weights, "params_map": params_map}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give one of model, weights and params_map, not {' and '.join(given)}")
        if not given and context is not None:
            model = find_or_none(context, model_id)
        pipes = legacy.pipes_of(self, context, pipes)
        workers = context.remote_workers if isinstance(context, CollectorContext) else ()
        lists = {"devices": devices, "params_map": params_map, "pipes": pipes or None, "context": workers or None}
        count = _agreed_count({"num_workers": num_workers, **lists, **self.implied_worker_counts()})
        if params_map is not None and sorted(per_worker(params_map) or ()) != [*range(count)]:
            raise ValueError(f"params_map is {{worker_idx: …}} for workers 0 to {count - 1}, not for {[*params_map]}")
        source = self.make_source(model_id, params_map or (model if weights is None else weights), device_map_fn)
        self._begin_sending(model_id, self.make_outlet(model_id, count), source, count)
        self._sender_model_id, self.context, self.model = model_id, context, model
        self._sentinels = {worker.worker_idx: worker.sentinel for worker in workers}
        self._pipes = pipes
        try:
            legacy.invite_all(self)  # send each worker the address through its pipe
        except Exception:  # of any class: it is raised again
            self.shutdown()
            raise

    def _begin_sending(self, model_id: str, outlet: Outlet, source: Source, count: int) -> None:
        self._sender = Sender(
            outlet,
            source,
            count,
            self._timeout,
            acknowledges=self.acknowledges,
            delivers_at_connect=self.delivers_at_connect,
            waits=self.waits,
            record=self.metrics.record,
        )
        self.model_id = model_id
        senders[id(self)] = self
        # Closes the outlet when the scheme is garbage-collected, or this process ends, without `shutdown`: before
        # `multiprocessing` joins the trainer's child processes, and never in a forked child.
        util.Finalize(self._sender, partial(outlet.close, graceful=False), exitpriority=0)

    def init_on_receiver(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        load: Load | None = None,
        worker_idx: int | None = None,
    ) -> None:
        """Set up a worker's end. Nothing is received yet.

        Args:
            model_id: the model's name, and its dotted path in ``context``.
            context: an object that has the model. Its ``cascade_weights(model_id)``, or else
                ``update_policy_weights_(weights=, model_id=)`` with a copy, is called when the newest update is
                installed and not yet acknowledged: outside the gate, in a thread of its own.
            model: the model itself, or a mapping of tensors into which weights are copied.
            load: for an inference engine: called inside the gate with an iterator over the ``(name, tensor)`` pairs of
                a version, which are valid during the call. ``model`` is then optional.
            worker_idx: this worker's index; otherwise ``connect`` is given it.

        Raises:
            RuntimeError: initialised already; or the scheme has no sender's address and no torch store with one.
            LookupError, TypeError: the context has no such model.
            ValueError: another model_id than the sender's; no model; or a context passes on what is not acknowledged.
        """
        if self._sender is not None and self._inherited:  # a forked worker has the trainer's end, too
            self._sender = self.model_id = None
        self._require_uninitialised()
        if self._sender_model_id not in (None, model_id):
            raise ValueError(f"the sender of this scheme sends '{self._sender_model_id}', not '{model_id}'")
        if model is None and load is None:
            if context is None:
                raise ValueError(f"init_on_receiver('{model_id}') needs the model, a context that has it, or load=")
            model = find_model(context, model_id)
        pass_on = _pass_on_of(context, model_id, model, self.strategy)
        if pass_on is not None and not self.acknowledges:
            raise ValueError(
                f"the context of '{model_id}' passes updates on, so a finished send needs acknowledgements: use "
                "initiator='sender', with shared_mem also acknowledge='installed', not a store"
            )
        receiver = self._make_receiver(model_id, model, pass_on, load)
        receiver.connection = self.make_connection(model_id, receiver)
        self._receiver, self.model_id, self.context, self.model = receiver, model_id, context, model
        self.worker_idx = worker_idx

    def _make_receiver(
        self, model_id: str, model: Any, pass_on: Callable[[], object] | None = None, load: Load | None = None
    ) -> Receiver:
        return Receiver(
            model_id,
            Destination(model, load=load, transform=compose(self.receive_transform, "receive_transform")),
            self.strategy,
            bind=self.bind,
            gate=self.gate,
            on_request=self.initiator == "receiver",
            max_staleness=self.max_staleness,
            timeout=self._timeout,
            pass_on=pass_on,
            device=self.device,
        )

    def init_in_process(self, model_id: str, model: nn.Module, source: Any = None) -> None:
        """Set up and connect both ends in this process: an update is installed before ``send`` returns.

        The weights of ``source`` are installed in ``model`` at once, and ``send()`` reads it again. LayoutMismatch: it
        does not fit the model. RuntimeError: the scheme is initialised.
        """
        self._require_uninitialised()
        receiver = self._make_receiver(model_id, model)
        receiver.on_request = False
        outlet = InProcess(receiver)
        self._begin_sending(model_id, outlet, self.make_source(model_id, source, None), 1)
        receiver.sender = outlet.name
        self._receiver, self.model = receiver, model
        try:
            self.sender.connect(None, None)
        except Exception:  # of any class: it is raised again
            self.shutdown()
            raise

    # --- connect ---

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        processes: Processes | None = None,
        wait: bool = True,
    ) -> None:
        """Wait until the other end calls ``connect`` too; deliver the first weights.

        A sender may call it again: it accepts late workers and replacements, and delivers to all.

        Args:
            worker_idx: on a receiver, this worker's index.
            weights: on the sender, first weights instead of the model's.
            processes: on the sender, the workers' processes, ``[process, …]`` or ``{worker: …}``: one that ends before
                it has connected is then an error at once, with its exit code.
            wait: False: return at once. The sender then connects by its first ``send``; a receiver in a thread:
                ``receive`` and ``pull`` wait for that, and until then the model acts with the weights that it has.

        Raises:
            NotConnected: not initialised; or the sender has ended, or has refused this worker.
            SyncTimeout: a worker did not connect or install the first weights in time; or the sender did not answer.
            WorkerDied, WorkerFailed: on the sender, naming the worker.
            LayoutMismatch, WeightSyncError: the weights do not fit a model, it raised an error, or the memory is full.
            TypeError, ValueError, RuntimeError: a wrong argument; a receiver is connected already, or inside the gate.
        """
        self._require_not_forked()
        if self._sender is not None:
            if worker_idx is not None:
                raise ValueError("connect() takes no worker_idx= on the sender")
            if self._listening is not None and not self._sender.connected:
                rendezvous = self.create_rendezvous()
                rendezvous.announce(self._listening, str(self.model_id), deadline_in(self.timeout))
            if not wait:
                self._sender.connect_first = partial(self.connect, weights=weights, processes=processes)
                return
            self._sender.connect(weights, processes if processes is not None else self._sentinels or None)
        elif self._receiver is not None:
            if weights is not None or processes is not None:
                raise ValueError("connect() takes no weights= and no processes= on the receiver")
            self.worker_idx = self.worker_idx if worker_idx is None else worker_idx
            if self.worker_idx is None:
                raise ValueError("worker_idx is missing: give it to init_on_receiver() or connect()")
            connect = self._receiver.connect if wait else self._receiver.connect_in_thread
            connect(self.worker_idx, self.timeout)
        else:
            raise NotConnected("call init_on_sender() or init_on_receiver() before connect(), also after shutdown()")

    def disconnect(self, worker_idx: int) -> None:
        """On the sender: treat a worker as dead. A call in another thread that waits for it raises ``WorkerDied``."""
        self._as_sender("disconnect").disconnect(worker_idx)

    def readmit(self, worker_idx: int, process: Process | None = None, timeout: float | None = None) -> None:
        """On the sender: wait for the process that takes the place of a worker, and until it has the newest update.

        It may connect at any time after the end of the former worker, which is disconnected if it is connected still.
        ``timeout``: seconds, None for the scheme's. It raises as ``connect`` does.
        """
        self._as_sender("readmit").readmit(worker_idx, process, timeout)

    def continue_from(self, version: int) -> None:
        """On the sender of a resumed run: number the next update at least ``version + 1``. ValueError: out of range."""
        self._as_sender("continue_from").continue_from(version)

    # --- updates ---

    def send(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, partial: bool = False
    ) -> SyncReport | None:
        """Deliver an update. When this returns, every forward that starts later in a worker uses it, or a newer one.

        With ``sync=False`` it does not wait. With ``initiator="receiver"`` it only makes the version available.
        Nothing may change the weights meanwhile.

        Args:
            weights: module, TensorDict, state dict, or ``{worker: any of these}``; None reads what was given at init.
            worker_ids: one, several, or (None) all workers.
            partial: whether ``weights`` are a part of the model; the rest keeps the values that were sent last.

        Returns:
            What the update has cost; None with ``sync=False``.

        Raises:
            NotConnected: before ``connect``; or no worker is left; or there are no weights to send.
            LayoutMismatch, WeightSyncError: they do not fit the model; or the memory is full. No model was changed.
            ValueError: an unknown worker; or ``partial`` with ``worker_ids``, or when workers have different weights.
            WorkerDied, WorkerFailed, SyncTimeout: names workers that lack version ``error.version`` (None: not sent).
        """
        sender = self._sender or self._as_sender("send")
        return sender.send(weights, worker_ids, wait=self.sync, partial=partial)

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send as ``send``, but do not wait. A newer update may replace this one. Also raises earlier calls' errors."""
        self._as_sender("send_async").send(weights, worker_ids, wait=False)

    def wait_async(self) -> SyncReport | None:
        """Wait until all that was sent without waiting is installed; return the newest report, None if there is none.

        It raises as ``send``: one error, for the oldest update that failed, with all that lack it or a later one.
        """
        return self._as_sender("wait_async").wait()

    def ledger(self) -> list[dict[str, Any]]:
        """On the sender: which version each worker has, in rows of plain values; None: not known. No message is sent.

        ``model``, ``scheme``, ``worker``; ``where``: its process, address or URL; ``state``: "alive", "dead", "never
        connected", "not known"; ``sent``, ``sent_at``: the newest version for it, in Unix seconds; ``installed``,
        ``installed_at``: what it has, and when all were known to have that; ``behind``: by how many versions;
        ``verified``, ``digest``: what ``verify`` has found; ``used``, ``used_at``: the version that a forward,
        ``receive`` or ``pull`` had used last then (0: none), and when first, by the worker's clock;
        ``error``: why it is dead, or lacks a version.
        """
        rows = self._as_sender("ledger").ledger()
        return [{"model": self.model_id, "scheme": self.metrics.scheme, **row} for row in rows]

    def verify(self, weights: Any = None, timeout: float | None = None) -> list[dict[str, Any]]:
        """On the sender: have workers compare all tensors that are installed with the trainer's; return the ledger.

        ``weights`` are those that were sent, as ``send`` takes them: None reads what was given at init. They pass all
        transforms, also this end's ``receive_transform``. ``timeout``: seconds, None for the scheme's.

        WorkerFailed, WorkerDied, SyncTimeout: one error names each worker, and the tensors that differ.
        NotConnected: nothing was sent. WeightSyncError: the workers cannot be asked.
        """
        transform = compose(self.receive_transform, "receive_transform")
        self._as_sender("verify").verify(weights, transform, self._timeout if timeout is None else timeout)
        return self.ledger()

    def receive(self, timeout: float | None = None) -> Any | None:
        """Wait for a version newer than the last one returned; at first, newer than the one ``connect`` delivered.

        Returns:
            The model's weights, of one version, not copied; with ``load=`` and no model, the version number. None after
            ``timeout`` seconds, and when the sender has shut down (``finished`` is then true) or this end has.

        NotConnected: the sender died, or has disconnected this worker; or an earlier call has told a shutdown.
        WeightSyncError: the model may be mixed from two versions. RuntimeError: called inside the gate.
        """
        return self._as_receiver("receive").receive(timeout)

    def pull(self, timeout: float | None = None) -> int:
        """On a receiver: install the version that is the newest at the time of the call; return its number.

        ``timeout``: seconds to wait for that version. The wait for a running forward, or for a store, is not limited.

        Raises:
            NotConnected: before ``connect``; or the connection is lost, and the last version was returned already.
            SyncTimeout: none was sent within ``timeout``, or the newest one did not arrive in time.
            WeightSyncError: the newest version failed to install or to be sent; or a store is unreadable.
            RuntimeError: called inside the gate.
        """
        return self._as_receiver("pull").pull(timeout)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply ``weights`` to this end's model, inside the gate, without sending anything; LayoutMismatch: no fit."""
        self._require_not_forked()
        if self.model is None:
            raise NotConnected("this end has no model to apply weights to")

        def apply() -> None:
            if self._receiver is not None:
                self._receiver.copy_to_own_memory()
            self.strategy.apply_weights(self.model, weights, inplace=inplace)

        process_gate().call_without_forward(apply)

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: WeightStrategy | None = None, context: Any = None
    ) -> Any:
        """Return ``weights`` (``{worker: weights}`` where they differ) in the strategy's format, before any transform.

        Nothing is sent or changed. NotConnected: no weights were given, and there is no model to take them from.
        """
        if weights is None and context is not None:
            weights = find_model(context, model_id)
        if weights is None:
            weights = self._as_sender("prepare_weights").source.weights
        if weights is None:
            raise NotConnected(f"there are no weights of '{model_id}' to prepare: give weights or a context")
        return extracted(weights, strategy or self.strategy)

    def shutdown(self) -> None:
        """Release connections, memory and threads. Idempotent. A worker's model keeps its weights, in its own memory.

        Updates sent without waiting may be lost: call ``wait_async`` first. A call in another thread ends.
        RuntimeError: inside the gate, in a worker.
        """
        if self._receiver is not None and process_gate().held_here:
            raise RuntimeError("call shutdown() outside any forward and any wsync.gate() block")
        if self._sender is not None:
            self._sender.close()
            self._address = self._sender_model_id = None  # a worker keeps both: it may connect again
        if self._receiver is not None:
            self._receiver.shutdown()
        self._sender = self._receiver = self._listening = None
        self.model_id = self.context = self.model = self.worker_idx = None
        self._pipes = []

    # --- the older API: see ``wsync.legacy`` ---

    init_on_worker = legacy.init_on_worker

    def synchronize_weights(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        self.connect(worker_idx=worker_idx, weights=weights)

    def create_sender(self) -> legacy.WeightSender:
        """Return the scheme's sender, also before ``init_on_sender``."""
        return legacy.WeightSender(self)

    def create_receiver(self) -> legacy.WeightReceiver:
        """Return the scheme's receiver, also before ``init_on_worker``."""
        return legacy.WeightReceiver(self)

    def get_sender(self) -> legacy.WeightSender:
        """Return the scheme's sender; ``NotConnected`` before ``init_on_sender``."""
        self._as_sender("get_sender")
        return self.create_sender()

    def get_receiver(self) -> legacy.WeightReceiver:
        """Return the scheme's receiver; ``NotConnected`` before ``init_on_worker``."""
        self._as_receiver("get_receiver")
        return self.create_receiver()

    # --- state ---

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @classmethod
    def from_backend(cls, name: str, **options: Any) -> WeightSyncScheme:
        """Return a scheme of the backend ``name``; ``ValueError`` lists those that there are."""
        return load_backend(name)(**options)

    @property
    def _inherited(self) -> bool:
        """Whether this is a forked child of the process that has initialised the scheme."""
        end = self._sender or self._receiver
        return end is not None and end.loop.inherited

    def _require_not_forked(self) -> None:
        if (end := self._sender or self._receiver) is not None:
            end.loop.require_own()

    def _require_uninitialised(self) -> None:
        if self.model_id is not None:
            where = "sender" if self._sender is not None else "receiver"
            raise RuntimeError(f"this scheme is already initialised on the {where}, for model '{self.model_id}'")

    def _as_sender(self, call: str) -> Sender:
        self._require_not_forked()
        if self._sender is None:
            raise self._wrong_end(call, "sender")
        return self._sender

    def _as_receiver(self, call: str) -> Receiver:
        self._require_not_forked()
        if self._receiver is None or self._sender is not None:
            raise self._wrong_end(call, "receiver")
        return self._receiver

    def _wrong_end(self, call: str, needed: str) -> NotConnected:
        why = "this scheme is initialised on the other end" if self.model_id else "also again after shutdown()"
        return NotConnected(f"{call}() needs init_on_{needed}() first: {why}")

    @property
    def timeout(self) -> float | None:
        """Seconds for ``connect`` and ``send``; None: no limit. It may be assigned at any time."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout is a number of seconds above 0, or None, not {seconds}")
        self._timeout = as_timeout(seconds)
        if self._sender is not None:
            self._sender.timeout = self._timeout

    @property
    def is_sender(self) -> bool:
        """Whether this end is the sender's. False before init, and in a child forked from the sender's process."""
        return self._sender is not None and not self._inherited

    @property
    def num_workers(self) -> int:
        """The number of workers; 0 on a receiver, and before init."""
        return 0 if self._sender is None else self._sender.num_workers

    @property
    def version(self) -> int:
        """On a sender the newest number used, on a receiver the model's; 0 before the first."""
        end = self._sender or self._receiver
        return 0 if end is None else end.version

    @property
    def sent_version(self) -> int:
        """On a sender the newest version that workers were given; on a receiver ``version``."""
        return self.version if self._sender is None else self._sender.sent_version

    @property
    def installed_version(self) -> int:
        """On a receiver the same as ``version``. On a sender 0, unless ``init_in_process`` put the model here."""
        return 0 if self._receiver is None else self._receiver.version

    @property
    def finished(self) -> bool:
        """On a receiver: whether the sender has shut down. False after its death, and after this end's ``shutdown``."""
        return self._receiver is not None and self._receiver.phase == "finished"

    @property
    def weights(self) -> Any:
        """This end's weights, live, in the strategy's format; None if there are none yet."""
        if self._receiver is not None and self._sender is None:
            return process_gate().call_model(self.model, self._receiver.weights, (), {})
        source = None if self._sender is None else self._sender.source.weights
        return None if source is None else extracted(source, self.strategy)

    @property
    def address(self) -> str:
        """Of a sender that listens: its address and its secret key, as text for ``wsync_reader.open``; else ""."""
        return "" if self._listening is None else self._listening.dump()

    @property
    def sender_transports(self) -> dict[int, TransportBackend]:
        """On the sender, ``{worker_idx: transport}``, whose ``send_weights`` sends to that worker."""
        return {worker: SchemeTransport(self, [worker]) for worker in range(self.num_workers)}

    @property
    def shared_transport(self) -> TransportBackend | None:
        """On the sender, one transport to all workers; None on a receiver."""
        return legacy.transport_to(self, None) if self.num_workers else None

    @property
    def receiver_transport(self) -> TransportBackend | None:
        """On a receiver, the transport from the sender; None on a sender."""
        return None if self.model_id is None or self.num_workers else SchemeTransport(self)

    @property
    def sender(self) -> Sender:
        """The send path; used by ``wsync.synchronize`` (``transaction.py``)."""
        return self._as_sender("sender")


def _agreed_count(given: Mapping[str, Any]) -> int:
    """Return the number of workers that arguments agree on: numbers, or one entry for each; 1 if all are None."""
    counts: dict[str, int] = {}
    for name, value in given.items():
        if isinstance(value, str) or not isinstance(value, Integral | Sequence | Mapping | None):
            raise TypeError(f"{name} is a whole number, or has one for each worker, not {value!r}")
        if value is not None:
            counts[name] = int(value) if isinstance(value, Integral) else len(value)
    if len(set(counts.values())) > 1:
        raise ValueError("how many workers? " + ", ".join(f"{name}: {count}" for name, count in counts.items()))
    count = next(iter(counts.values()), 1)
    if count < 1:
        raise ValueError(f"num_workers is at least 1, not {count}")
    return count


def _pass_on_of(context: object, model_id: str, model: object, strategy: WeightStrategy) -> Callable[[], object] | None:
    """Return what passes an update of ``model`` on to workers of ``context``; None if that has no method for it."""
    cascade: Callable[[str], object] | None = getattr(context, "cascade_weights", None)
    update: Callable[..., object] | None = getattr(context, "update_policy_weights_", None)
    if cascade is not None:
        return lambda: cascade(model_id)
    if update is None:
        return None

    def pass_on() -> None:
        copy = process_gate().call_model(model, lambda: deepcopy(strategy.extract_weights(model)), (), {})
        update(weights=copy, model_id=model_id)

    return pass_on
