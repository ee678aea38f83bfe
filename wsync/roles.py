"""The two roles that a scheme can have: state that only one end has stands in that end's role."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import util
from numbers import Integral
from typing import Any
from weakref import ref

from wsync.errors import NotConnected, in_forked_child
from wsync.receiver import Receiver
from wsync.receiving.joining import BackgroundConnect
from wsync.sender import Sender
from wsync.sending.protocols import SendChannel
from wsync.sending.source import per_worker


@dataclass(frozen=True, slots=True)
class SenderRole:
    """A scheme that was initialised on the sender.

    Attributes:
        address: what a worker needs to find the sender; picklable.
        sentinels: by worker, a descriptor that is readable when its process has ended.
        in_process_receiver: the receiver, where both ends are in this process.
    """

    model_id: str
    context: Any
    model: Any
    sender: Sender
    channel: SendChannel
    address: Any
    sentinels: Mapping[int, int]
    in_process_receiver: Receiver | None = None
    pid: int = field(default_factory=os.getpid)

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child of the one that has initialised the scheme."""
        return self.pid != os.getpid()


@dataclass(frozen=True, slots=True)
class ReceiverRole:
    """A scheme that was initialised on a receiver.

    Attributes:
        background_connect: the connection that ``init_on_worker`` has begun, which the receiver thread completes.
    """

    model_id: str
    context: Any
    model: Any
    receiver: Receiver
    worker_idx: int | None
    background_connect: BackgroundConnect | None = None
    pid: int = field(default_factory=os.getpid)

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child of the one that has initialised the scheme."""
        return self.pid != os.getpid()


Role = SenderRole | ReceiverRole | None
"""A scheme's; None before init, and after ``shutdown``."""


def require_fresh(role: Role) -> None:
    """Check that a scheme is not initialised.

    Raises:
        RuntimeError: it is; names the end and the model.
    """
    if role is not None:
        end = "sender" if isinstance(role, SenderRole) else "receiver"
        where = ", in the parent of this forked process" if role.inherited else ""
        raise RuntimeError(f"this scheme is already initialised on the {end}, for model '{role.model_id}'{where}")


def require_own(role: Role) -> None:
    """Check that a scheme was not initialised in the parent of this forked process.

    Raises:
        NotConnected: it was.
    """
    if role is not None and role.inherited:
        raise in_forked_child()


def sender_role(role: Role, what: str) -> SenderRole:
    """Return the role of a scheme on the sender.

    Raises:
        NotConnected: it has another role, or none; or this is a forked child of the process that initialised it.
    """
    if not isinstance(role, SenderRole):
        where = "this is a receiver" if role else "init_on_sender() has not been called, or shutdown() was"
        raise NotConnected(f"{what}() belongs to the sender, and {where}")
    require_own(role)
    return role


def receiver_role(role: Role, what: str) -> ReceiverRole:
    """Return the role of a scheme on a receiver.

    Raises:
        NotConnected: it has another role, or none; or this is a forked child of the process that initialised it.
    """
    if not isinstance(role, ReceiverRole):
        where = "is initialised on the sender" if role else "is not initialised, or was shut down"
        raise NotConnected(f"{what}() belongs to a receiver, and this scheme {where}: call init_on_receiver()")
    require_own(role)
    return role


def agreed_count(
    num_workers: int | None,
    devices: Sequence[Any] | None,
    params_map: Mapping[int, Any] | None,
    workers: Sequence[Any],
    options: Mapping[str, int],
) -> int:
    """Return the number of workers on which all given arguments agree; 1 if none names it.

    Args:
        num_workers: the number itself.
        devices: one for each worker.
        params_map: weights for each worker, by index.
        workers: of the context.
        options: of the scheme, those that have one entry for each worker: their names and lengths.

    Raises:
        TypeError: one is no number, or no list.
        ValueError: they contradict one another.
    """
    if num_workers is not None and not isinstance(num_workers, Integral):
        raise TypeError(f"num_workers is a whole number, not {num_workers!r}")
    if devices is not None and (isinstance(devices, str) or not isinstance(devices, Sequence)):
        raise TypeError(f"devices is a list, one for each worker, not {devices!r}")
    counts = {
        "num_workers": num_workers,
        "devices": None if devices is None else len(devices),
        "params_map": None if params_map is None else len(params_map),
        "the context's workers": len(workers) or None,
        **options,
    }
    count = single_count(counts)
    count = 1 if count is None else count
    if count < 1:
        raise ValueError(f"num_workers is at least 1, not {count}")
    indices = sorted(worker.worker_idx for worker in workers)
    if indices and indices != list(range(count)):
        raise ValueError(f"the context's workers have the indices 0 to {count - 1}, not {indices}")
    if params_map is not None and set(per_worker(params_map) or ()) != set(range(count)):
        raise ValueError(
            f"params_map is {{worker_idx: weights}} for workers 0 to {count - 1}, not for {list(params_map)}"
        )
    return count


def single_count(counts: Mapping[str, int | None]) -> int | None:
    """Return the number on which all of ``counts``, by the name of the argument, agree; None if all are None.

    Raises:
        ValueError: they contradict one another.
    """
    given = {name: count for name, count in counts.items() if count is not None}
    if len(set(given.values())) > 1:
        raise ValueError("how many workers? " + ", ".join(f"{name}: {count}" for name, count in given.items()))
    return next(iter(given.values()), None)


def close_at_exit(channel: SendChannel) -> None:
    """Close ``channel`` before this process waits for its children, unless that has been done.

    A trainer that ends by an error has not shut down. ``multiprocessing`` then joins its child processes, which may be
    waiting for weights. Finalizers of ``multiprocessing`` run before that; a forked child inherits none.
    """
    util.Finalize(channel, _close, args=(ref(channel),), exitpriority=0)


def _close(reference: ref[SendChannel]) -> None:
    channel = reference()
    if channel is not None:
        channel.close()
