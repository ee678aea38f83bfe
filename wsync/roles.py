"""The roles that a scheme can have: each role holds the state that only its side needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from wsync.control.processes import Processes, watched
from wsync.errors import NotConnected, forked_child_error
from wsync.gate import process_gate, without_forward
from wsync.paths import find_model
from wsync.receiver import Receiver
from wsync.receiving.joining import BackgroundConnect
from wsync.sender import Sender
from wsync.sending.source import extracted
from wsync.weights.strategy import WeightStrategy


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Role:
    """What a scheme was initialised with. ``Role()`` itself: nothing yet, or ``shutdown`` was called.

    Attributes:
        side: which side of the connection this is; empty before init.
        model_id: the model's name; None before init.
        pid: the process id of the process that initialised the scheme.
    """

    side: Literal["sender", "receiver", ""] = ""
    model_id: str | None = None
    context: Any = None
    model: Any = None
    pid: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        """Return the side, the model and the version, for a reader."""
        if self.model_id is None:
            return "not initialised"
        worker = "worker" if self.worker_idx is None else f"worker {self.worker_idx}"
        end = f"sender to {self.num_workers} worker(s)" if self.side == "sender" else worker
        return f"{end}, model '{self.model_id}', version {self.version}"

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child of the one that has initialised the scheme."""
        return self.model_id is not None and self.pid != os.getpid()

    def require_not_forked(self) -> None:
        """Check that the scheme was not initialised in the parent of this forked process.

        Raises:
            NotConnected: it was.
        """
        if self.inherited:
            raise forked_child_error()

    def require_uninitialised(self) -> None:
        """Check that the scheme is not initialised.

        Raises:
            RuntimeError: it is; names the side and the model.
        """
        if self.model_id is not None:
            where = f"on the {self.side}" + (", in the parent of this forked process" if self.inherited else "")
            raise RuntimeError(f"this scheme is already initialised {where}, for model '{self.model_id}'")

    def reject_arguments(self, **given: object) -> None:
        """Raise ``ValueError`` if one of these arguments of ``connect``, which the other end takes, is not None."""
        if names := [f"{name}=" for name, value in given.items() if value is not None]:
            raise ValueError(f"connect() takes no {' and no '.join(names)} on the {self.side}")

    def as_sender(self, what: str) -> SenderRole:
        """Return this role if it is a sender's: ``SenderRole`` overrides this method. ``what`` is the method called.

        Raises:
            NotConnected: it is no sender's; or this is a forked child of the process that initialised the scheme.
        """
        if self.model_id:
            raise NotConnected(f"{what}() can only be called on the sender; this scheme is initialised on a receiver")
        raise NotConnected(f"{what}() needs init_on_sender() first; after shutdown(), initialise the scheme again")

    def as_receiver(self, what: str) -> ReceiverRole:
        """Return this role if it is a receiver's; raises as ``as_sender`` does."""
        if self.model_id:
            raise NotConnected(f"{what}() can only be called on a receiver; this scheme is initialised on the sender")
        raise NotConnected(f"{what}() needs init_on_receiver() first; after shutdown(), initialise the scheme again")

    @property
    def worker_idx(self) -> int | None:
        """See ``SchemeBase``."""
        return None

    @property
    def num_workers(self) -> int:
        """The number of workers; 0 on a receiver."""
        return 0

    @property
    def version(self) -> int:
        """On a sender the newest number used; on a receiver the version that is installed."""
        return 0

    @property
    def sent_version(self) -> int:
        """The newest version that workers were given; the same as ``version`` if this is no sender."""
        return self.version

    @property
    def installed_version(self) -> int:
        """The version that this receiver has installed; 0 on a sender (see ``SchemeBase``)."""
        return self.version

    @property
    def finished(self) -> bool:
        """On a receiver: whether the sender has shut down."""
        return False

    def source_weights(self) -> Any:
        """Return what ``send()`` without arguments reads: a model, weights, ``{worker: weights}`` or None.

        Raises:
            NotConnected: this is no sender.
        """
        return self.as_sender("prepare_weights").sender.source.weights

    def weights(self, strategy: WeightStrategy) -> Any:
        """Return this end's weights, live, in the format of ``strategy``; None if there are none yet."""
        return None

    def apply_weights(self, strategy: WeightStrategy, weights: Any, inplace: bool) -> None:
        """Apply ``weights`` to this end's model, inside the gate.

        Raises:
            LayoutMismatch: they do not fit; nothing was applied.
            NotConnected: this end has no model; or this is a forked child of the process that initialised the scheme.
        """
        self.require_not_forked()
        if self.model is None:
            raise NotConnected("this end has no model to apply weights to")
        with without_forward(), process_gate().hold():
            self.make_writable()
            strategy.apply_weights(self.model, weights, inplace=inplace)

    def make_writable(self) -> None:
        """Move the model's parameters out of shared memory, which must not be written. Called inside the gate."""

    def require_closable(self) -> None:
        """Raise ``RuntimeError`` where ``close`` would wait for ever."""

    def close(self) -> None:
        """Release this end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderRole(Role):
    """A scheme that was initialised on the sender.

    Attributes:
        sentinels: by worker, a descriptor that is readable when its process has ended.
        in_process_receiver: the receiver, where both ends are in this process.
    """

    side: Literal["sender", "receiver", ""] = "sender"
    sender: Sender
    sentinels: Mapping[int, int] = field(default_factory=dict)
    in_process_receiver: Receiver | None = None

    def as_sender(self, what: str) -> SenderRole:
        """See ``Role``."""
        self.require_not_forked()
        return self

    def connect(self, weights: Any, processes: Processes | None) -> None:
        """Wait for all workers; see the scheme."""
        with watched(processes, self.sender.num_workers) as sentinels:
            self.sender.connect(weights, {**self.sentinels, **sentinels})

    @property
    def num_workers(self) -> int:
        """See ``Role``."""
        return self.sender.num_workers

    @property
    def version(self) -> int:
        """See ``Role``."""
        return self.sender.version

    @property
    def sent_version(self) -> int:
        """See ``Role``."""
        return self.sender.sent_version

    @property
    def installed_version(self) -> int:
        """See ``Role``: 0 if the workers are elsewhere."""
        return self.in_process_receiver.version if self.in_process_receiver else 0

    def weights(self, strategy: WeightStrategy) -> Any:
        """See ``Role``."""
        source = self.sender.source.weights
        return None if source is None else extracted(source, strategy)

    def close(self) -> None:
        """See ``Role``."""
        self.sender.close()  # first: it waits for a send in another thread
        if self.in_process_receiver is not None:
            self.in_process_receiver.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverRole(Role):
    """A scheme that was initialised on a receiver.

    Attributes:
        index: the worker's index, if init was given it.
        background_connect: the connection that ``init_on_worker`` has begun, which the receiver thread completes.
    """

    side: Literal["sender", "receiver", ""] = "receiver"
    receiver: Receiver
    index: int | None = None
    background_connect: BackgroundConnect | None = None

    def as_receiver(self, what: str) -> ReceiverRole:
        """See ``Role``."""
        self.require_not_forked()
        return self

    def connect(self, worker_idx: int | None, timeout: float | None, *, acknowledges: bool) -> None:
        """Connect to the sender, see the scheme. If ``init_on_worker`` has begun to connect, wait for that instead.

        ``timeout``: seconds; None for no limit. ``acknowledges``: whether the sender awaits acknowledgements.
        """
        index = self.index if worker_idx is None else worker_idx
        if index is None:
            raise ValueError("worker_idx is missing: give it to init_on_receiver() or connect()")
        if (joining := self.background_connect) is not None and joining.pending:
            if index != self.index:
                raise ValueError(f"init_on_worker() has begun to connect worker {self.index}, not {index}")
            joining.finish(timeout)
            if self.receiver.connected:
                return
        self.receiver.connect(index, timeout)
        if not acknowledges:  # the next forward installs an update: only a thread in receive() has to be woken
            self.receiver.updater.state.wake_only_for_receive()

    @property
    def worker_idx(self) -> int | None:
        """See ``Role``."""
        return self.receiver.worker_idx if self.receiver.worker_idx >= 0 else self.index

    @property
    def version(self) -> int:
        """See ``Role``."""
        return self.receiver.version

    @property
    def finished(self) -> bool:
        """See ``Role``."""
        return self.receiver.finished

    def weights(self, strategy: WeightStrategy) -> Any:
        """See ``Role``."""
        model = self.receiver.destination.model
        subject = self if model is None else model  # None would stand for all models
        return process_gate().call_for(subject, self.receiver.weights)

    def make_writable(self) -> None:
        """See ``Role``."""
        self.receiver.updater.copy_to_own_memory(stay_unbound=True)

    def require_closable(self) -> None:
        """See ``Role``: the receiver thread, which ``close`` waits for, may be waiting for the gate."""
        if process_gate().held_here:
            raise RuntimeError("call shutdown() outside any forward and any wsync.gate() block")

    def close(self) -> None:
        """See ``Role``."""
        if self.background_connect is not None:
            self.background_connect.close()
        self.receiver.close()
        process_gate().call_without_forward(self.receiver.updater.allow_forwards)  # if it had refused them


def prepared_weights(role: Role, weights: Any, model_id: str, strategy: WeightStrategy, context: Any) -> Any:
    """Return ``weights`` (or the context's, or those given at init) as ``extracted`` does.

    Raises:
        NotConnected: there are none.
    """
    if weights is None:
        weights = role.source_weights() if context is None else find_model(context, model_id)
    if weights is None:
        raise NotConnected(f"there are no weights of '{model_id}' to prepare: give weights or a context")
    return extracted(weights, strategy)
