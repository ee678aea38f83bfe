"""The part of a scheme that does not communicate: options, what a backend defines, state. The rest is ``scheme.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, Self

import torch

from wsync import assembly
from wsync.control.processes import Processes
from wsync.deadlines import as_timeout
from wsync.metrics import SyncMetrics
from wsync.options import check_option_names, check_pull_options, full_signature
from wsync.receiving.protocols import RequestChannel
from wsync.rendezvous import Rendezvous, SocketRendezvous
from wsync.roles import ReceiverRole, Role, SenderRole, prepared_weights
from wsync.scheme_transports import ReceiverTransport, SenderTransport
from wsync.sender import Sender
from wsync.sending.source import DeviceMap, Source
from wsync.transforms.chain import Transform, compose
from wsync.transport import FlatTransport, TransportBackend
from wsync.weights.strategy import Format, WeightStrategy


class SchemeBase(ABC):
    """What a scheme is; ``WeightSyncScheme`` adds what it does. Any thread may call the methods.

    Args:
        strategy: the format of weights that ``receive`` and ``weights`` return and that a transport is given,
            ``"tensordict"`` or ``"state_dict"``. ``send`` takes both.
        sync: whether ``send`` waits for the workers, see ``send``; otherwise, as after ``send_async``, ``wait_async``
            does. If a worker has died meanwhile, or has refused the update, the next ``send`` first sends its own
            update to the remaining workers, and then raises that error.
        timeout: seconds for ``connect`` and for ``send``; None for no limit.
        bind: whether a worker's parameters may point directly into received, possibly shared memory. False for a worker
            that writes to its parameters, e.g. trains: it would corrupt the shared copy.
        send_transform: a function, or a list (``wsync.transforms``), that ``send`` applies to weights, in its thread.
        receive_transform: what is done to them in the worker, before they are installed; picklable. Called inside the
            gate, by the thread that installs.
        initiator: ``"sender"``: ``send`` has workers install each version. ``"receiver"``: it only makes the version
            available, and a worker installs the newest one when it calls ``pull``. With either value ``connect``
            installs the first weights, if the sender has any by then.
        max_staleness: with ``initiator="receiver"``: a worker with a model more than this many versions behind
            fetches the newest before its next forward; None for no limit.

    Attributes:
        metrics: what each update has cost.
        send_transform, receive_transform: as given; may be assigned before init.
    """

    name: ClassVar[str] = ""
    """The backend's name in reports; by default the class's name."""
    collectors: ClassVar[tuple[str, ...]] = ("multi_sync", "multi_async", "single")
    """Values of ``collector=`` in ``train.py`` that work with this scheme, the default first; empty if none does."""
    sends_weights: ClassVar[bool] = True
    """Whether anything is sent; false for the backend ``none`` alone."""
    sender_driven: ClassVar[bool] = False
    """Whether ``connect`` of the sender also sets up the receivers, which are Ray actors of its ``context``."""
    delivers_at_connect: ClassVar[bool] = True
    """Whether the first weights are delivered by ``connect``; otherwise by the first ``send``."""
    arena_only: ClassVar[bool] = False
    """Whether all workers take weights from the arena (``shm/arena.py``): they are on the sender's machine."""
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
        check_pull_options(initiator, max_staleness)
        self.initiator: Literal["sender", "receiver"] = initiator
        self.max_staleness = max_staleness
        self._role = Role()
        self._address: Any = None  # of the sender; travels in the pickle
        self._sender_model_id: str | None = None  # the model that the sender at this address sends
        self._pipes: list[Any] = []  # of the older API, by worker: see ``wsync.legacy``
        self._strategy = WeightStrategy(strategy)
        self.sync = sync
        self.timeout = timeout
        self.bind = bind
        self.send_transform = send_transform
        self.receive_transform = receive_transform
        self.checksum: bool | None = None  # see ``SenderSettings``
        self.metrics = SyncMetrics(self.name or type(self).__name__)

    def __init_subclass__(cls, **options: Any) -> None:
        """Have ``inspect.signature`` name every option of a scheme."""
        super().__init_subclass__(**options)
        cls.__signature__ = full_signature(cls)

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Raise TypeError for an unknown option: a base class would name itself instead of ``cls``."""
        check_option_names(cls, options)
        return super().__new__(cls)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._role}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return options and address, without weights, model, role; for workers also without ``send_transform``."""
        state = {**self.__dict__, "_role": Role(), "_pipes": [], "metrics": SyncMetrics(self.metrics.scheme)}
        return state if self._sender_model_id is None else {**state, "send_transform": None}

    # --- what a backend overrides ---

    @abstractmethod
    def create_transport(self, worker_idx: int | None = None) -> TransportBackend | FlatTransport:
        """Return a new transport to (or in) worker ``worker_idx``. Called once per connection, at either end.

        Called by the thread in ``connect`` or ``readmit``; with ``init_on_worker``, by the receiver thread.
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
        """Return whether workers on the sender's machine use the arena: all do, or an option of the scheme says so."""
        return self.arena_only

    def _implied_worker_counts(self) -> Mapping[str, int]:
        """Return the number of workers that an option of the backend implies, by its name, e.g. ``{"urls": 2}``."""
        return {}

    def _make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None, **options: Any) -> Source:
        transform = compose(self.send_transform, "send_transform")
        return Source(weights, self.strategy, device_map_fn=device_map_fn, transform=transform, **options)

    def _open_sender(self, model_id: str, source: Source, num_workers: int) -> Sender:
        """Open the listening socket, and set ``_address`` and ``_sender_model_id``."""
        listener, address = self.create_rendezvous().open()
        sender = assembly.make_sender(self, source, num_workers, listener)
        self._address, self._sender_model_id = address, model_id  # last: they are not set if this fails
        return sender

    def _open_receiver(self, model_id: str) -> RequestChannel:
        """Return the worker's end of the connection, which ``connect`` will make."""
        return assembly.make_receive_channel(self, model_id)

    @abstractmethod
    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, processes: Processes | None = None
    ) -> None:
        """See ``WeightSyncScheme``."""

    # --- state; each property reads the role once: another thread may shut the scheme down ---

    @property
    def strategy(self) -> WeightStrategy:
        """The format in which weights are returned; it cannot be assigned."""
        return self._strategy

    @strategy.setter
    def strategy(self, _: object) -> NoReturn:
        raise AttributeError("strategy is fixed at construction; send_transform changes what is sent")

    @property
    def timeout(self) -> float | None:
        """Seconds for ``connect`` and ``send``; None: no limit. One set after ``init_on_sender`` is not pickled."""
        role = self._role
        return role.sender.timeout if isinstance(role, SenderRole) else self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout is a number of seconds above 0, or None, not {seconds}")
        role = self._role
        if isinstance(role, SenderRole):
            role.sender.timeout = as_timeout(seconds)
        else:
            self._timeout = as_timeout(seconds)

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
    def worker_idx(self) -> int | None:
        """This worker's index; None on the sender."""
        return self._role.worker_idx

    @property
    def num_workers(self) -> int:
        """The number of workers; 0 on a receiver, and before init."""
        return self._role.num_workers

    @property
    def version(self) -> int:
        """On a sender the newest number used (see ``continue_from``), on a receiver the model's; 0 before the first."""
        return self._role.version

    @property
    def sent_version(self) -> int:
        """On a sender the newest version that workers were given, 0 before the first; on a receiver ``version``."""
        return self._role.sent_version

    @property
    def installed_version(self) -> int:
        """On a receiver the same as ``version``. On a sender 0, unless ``init_in_process`` put the model here."""
        return self._role.installed_version

    @property
    def finished(self) -> bool:
        """On a receiver: whether the sender has shut down. False after its death, and after this end's ``shutdown``."""
        return self._role.finished

    @property
    def weights(self) -> Any:
        """This end's weights, live, in the strategy's format; None if there are none yet."""
        return self._role.weights(self.strategy)

    @property
    def sender_transports(self) -> dict[int, TransportBackend]:
        """On the sender, ``{worker_idx: transport}``; a transport's ``send_weights`` calls ``send`` for its worker."""
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

    def _make_ready_for_receiver(self) -> None:
        """Close what a forked child has of the trainer's end. RuntimeError: this end is initialised already."""
        if isinstance(self._role, SenderRole) and self._role.inherited:
            self._role.sender.close()
            self._role = Role()
        self._role.require_uninitialised()

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
