"""What a scheme is on either end: a trainer's role, or a worker's. State that one end has, the other has not."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from torch import nn

from wsync.errors import NotConnected
from wsync.ports import ReceiverPort, SenderPort
from wsync.receiving.gate import process_gate
from wsync.receiving.joining import Joining
from wsync.receiving.receiver import Receiver
from wsync.sending.end import SenderEnd
from wsync.sending.sender import Sender
from wsync.sending.source import per_worker
from wsync.transport import TransportBackend
from wsync.types import RemoteWorker
from wsync.weights.snapshot import snapshot
from wsync.weights.strategy import WeightStrategy


@dataclass(frozen=True, slots=True)
class Trainer:
    """The sender's role."""

    model_id: str
    context: Any
    model: Any
    sender: Sender
    end: SenderEnd
    sentinels: Mapping[int, int]
    pid: int
    local: Receiver | None = None  # the other end, where it is in this process


@dataclass(frozen=True, slots=True)
class Worker:
    """A receiver's role."""

    model_id: str
    context: Any
    model: nn.Module
    receiver: Receiver
    worker_idx: int | None
    joining: Joining | None = None  # its rendezvous, where the thread does that


class SchemeView(ABC):
    """What can be seen of a scheme, whichever role it has.

    The role is read once wherever something is asked of it: another thread's ``shutdown`` may take it away.
    """

    _transport: ClassVar[type[SenderPort]] = SenderPort  # the sender's line to some workers
    _strategy: WeightStrategy
    _timeout: float | None
    _role: Trainer | Worker | None

    @abstractmethod
    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """The rendezvous, which a line of this scheme's calls for: see ``Lifecycle``."""

    @property
    def context(self) -> Any:
        """The collector (or other context) of this end, if any."""
        return self._role.context if self._role else None

    @property
    def model(self) -> Any:
        """The model of this end, if it has one."""
        return self._role.model if self._role else None

    @property
    def model_id(self) -> str | None:
        """The model's name; None before init."""
        return self._role.model_id if self._role else None

    @property
    def strategy(self) -> WeightStrategy:
        """The format in which weights are handed out.

        Raises:
            AttributeError: set: another one would have no say in what is sent.
        """
        return self._strategy

    @strategy.setter
    def strategy(self, _: object) -> NoReturn:
        why = "it is chosen when the scheme is made, by name, and has no say in what is sent"
        raise AttributeError(f"no strategy can be set: {why} (device_map_fn has)")

    @property
    def worker_idx(self) -> int | None:
        """Which worker this is; None on the sender."""
        role = self._role
        if not isinstance(role, Worker):
            return None
        connected = role.receiver.worker_idx
        return connected if connected >= 0 else role.worker_idx

    @property
    def version(self) -> int:
        """The newest version sent; on a receiver, the one that the model has. 0 before the first."""
        role = self._role
        if isinstance(role, Trainer):
            return role.sender.version
        return role.receiver.version if role else 0

    @property
    def weights(self) -> Any:
        """This end's weights, live, in the strategy's format; None if there are none yet."""
        role = self._role
        if isinstance(role, Worker):
            return process_gate().call(role.receiver.weights)
        source = role.sender.source.weights if role else None
        if source is None:
            return None
        apart = per_worker(source)
        if apart is not None:
            return {worker: self.strategy.extract_weights(weights) for worker, weights in apart.items()}
        return self.strategy.express(snapshot(source))

    @property
    def timeout(self) -> float | None:
        """Seconds for ``connect`` and ``send``, from the next one on; None for no limit.

        Raises:
            ValueError: set to something else.
        """
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout is a number of seconds above 0, or None, not {seconds}")
        self._timeout = None if seconds == math.inf else seconds
        role = self._role
        if isinstance(role, Trainer):
            role.sender.timeout = self._timeout

    @property
    def num_workers(self) -> int:
        """How many workers there are to be; 0 before init."""
        role = self._role
        return role.sender.num_workers if isinstance(role, Trainer) else 0

    @property
    def sender_transports(self) -> dict[int, TransportBackend]:
        """On the sender, the line to each worker; empty on a receiver."""
        if not isinstance(self._role, Trainer):
            return {}
        return {worker: self.create_transport(worker_ids=[worker]) for worker in range(self.num_workers)}

    @property
    def shared_transport(self) -> TransportBackend | None:
        """On the sender, one line to all workers, where the backend has such a thing."""
        return None

    @property
    def receiver_transport(self) -> TransportBackend | None:
        """On a receiver, the line to the sender."""
        role = self._role
        return ReceiverPort(role.receiver, self.connect) if isinstance(role, Worker) else None

    def create_transport(
        self, pipe_or_context: Any = None, *, worker_ids: Sequence[int] | None = None
    ) -> TransportBackend:
        """The sender's line to some workers (None: all).

        Args:
            pipe_or_context: the older API's way to say whom: a worker (``RemoteWorker``), or a context, which means all
                of them; and see ``PipedScheme``.
            worker_ids: whom.
        """
        if isinstance(pipe_or_context, RemoteWorker):
            worker_ids = [pipe_or_context.worker_idx]
        return self._port(self._trainer("create_transport"), worker_ids)

    def _port(self, role: Trainer, worker_ids: Sequence[int] | None) -> TransportBackend:
        """A backend's own kind of line, for ``create_transport``."""
        return self._transport(role.sender, self.connect, worker_ids)

    @property
    def sender(self) -> Sender:
        """The send path, for ``synchronize`` and collectors."""
        return self._trainer("sender").sender

    @property
    def receiver(self) -> Receiver:
        """The receive path, for collectors; also of a scheme whose both ends are in this process."""
        role = self._role
        if isinstance(role, Trainer) and role.local is not None:
            return role.local
        return self._worker("receiver").receiver

    def _trainer(self, what: str) -> Trainer:
        role = self._role
        if not isinstance(role, Trainer):
            where = "is initialised on a receiver" if role else "has not seen init_on_sender(), or was shut down"
            raise NotConnected(f"{what}() belongs to the sender, and this scheme {where}")
        return role

    def _worker(self, what: str) -> Worker:
        role = self._role
        if not isinstance(role, Worker):
            where = (
                "is initialised on the sender"
                if role
                else "is not initialised, or was shut down: call init_on_receiver() first"
            )
            raise NotConnected(f"{what}() belongs to a receiver, and this scheme {where}")
        return role
