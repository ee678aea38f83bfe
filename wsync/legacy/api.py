"""The older API's senders, receivers and ``init_on_worker``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from wsync.deadlines import deadline_in, remaining
from wsync.legacy.pipes import read_invitation
from wsync.paths import find_or_none
from wsync.receiving.joining import BackgroundConnect
from wsync.roles import ReceiverRole, SenderRole
from wsync.types import ModelHolder, NumberedContext, SyncReport

if TYPE_CHECKING:
    from wsync.scheme import WeightSyncScheme


@runtime_checkable
class PipeContext(Protocol):
    """A worker's context that has the pipe to the trainer."""

    pipe: Any


class WeightSender:
    """Sends one model's weights to its workers.

    Args:
        scheme: initialised on the sender before the first call.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> SyncReport | None:
        """Deliver an update: see ``WeightSyncScheme.send``. The first one waits for every worker.

        Raises:
            NotConnected: ``init_on_sender`` has not been called.
            SyncTimeout: names the workers that have not called ``init_on_worker`` within the scheme's ``timeout``; and
                all that ``WeightSyncScheme.send`` raises.
        """
        connect_sender(self._scheme)
        return self._scheme.send(weights, worker_ids)

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send without waiting for the update; the first one waits for every worker, as ``send`` does."""
        connect_sender(self._scheme)
        self._scheme.send_async(weights, worker_ids)

    def wait_async(self) -> SyncReport | None:
        """Wait until what ``send_async`` has sent is installed.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: as ``send``.
        """
        return self._scheme.wait_async()


class WeightReceiver:
    """Receives one model's weights in one worker.

    They are installed as they arrive, between two forwards, whether ``receive`` is called or not.

    Args:
        scheme: initialised on the worker before the first call.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme

    def receive(self, timeout: float | None = None) -> bool:
        """Wait for weights newer than those of the last call; return whether there are any.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            NotConnected: ``init_on_worker`` has not been called; or the sender is gone.
            WeightSyncError: the sender's weights do not fit this model, or it refused this worker.
        """
        deadline = deadline_in(timeout)
        role = self._scheme._role
        connecting = role.background_connect if isinstance(role, ReceiverRole) else None
        if connecting is not None and not connecting.wait(timeout):
            return False
        received = self._scheme.receive(remaining(deadline))
        return received is not None and received is not False  # a TensorDict has no truth value


def connect_sender(scheme: WeightSyncScheme) -> None:
    """Wait for all workers, if that has not been done."""
    role = scheme._role
    if isinstance(role, SenderRole) and not role.sender.connected:
        scheme.connect()


def init_on_worker(
    scheme: WeightSyncScheme,
    model_id: str,
    context: Any,
    *,
    pipe: Any,
    model: nn.Module | None,
    worker_idx: int | None,
) -> None:
    """Set up and begin to connect a worker, without waiting for the sender; the receiver thread does the rest.

    Args:
        scheme: a worker's own, if there is a pipe; else the sender's, pickled.
        model_id: the model's name, and its path in ``context``.
        context: an object that has the model (under that name, or as ``model``); it may have ``worker_idx`` and
            ``pipe``.
        pipe: the other end of one that ``init_on_sender`` was given. Its message, which is waited for until the
            scheme's timeout, tells where the sender is and which worker this is.
        model: the model itself.
        worker_idx: this worker's index, where there is no pipe.

    Raises:
        NotConnected: the sender is gone.
        SyncTimeout: ``init_on_sender`` was not called in time.
        ValueError: no index; or something else came through the pipe; and all that ``init_on_receiver`` raises.
    """
    if pipe is None and isinstance(context, PipeContext):
        pipe = context.pipe
    if pipe is not None:
        scheme._require_fresh_receiver()
        invited, scheme._address = read_invitation(pipe, model_id, scheme.timeout)
        if worker_idx not in (None, invited):
            raise ValueError(f"which worker is this? worker_idx: {worker_idx}, pipe: {invited}")
        worker_idx = invited
    if worker_idx is None and isinstance(context, NumberedContext):
        worker_idx = context.worker_idx
    if worker_idx is None:
        raise ValueError("which worker is this? give init_on_worker() a worker_idx, or a context that has it")
    if model is None and context is not None:
        model = find_or_none(context, model_id)
        if model is None and isinstance(context, ModelHolder) and isinstance(context.model, nn.Module):
            model = context.model
    scheme.init_on_receiver(model_id, context, model=model, worker_idx=worker_idx)
    role = scheme._receiver_role("init_on_worker")
    try:
        descriptors = role.receiver.begin_connect(worker_idx, scheme.timeout)
    except Exception:
        scheme._role = None
        raise
    scheme._role = replace(role, background_connect=BackgroundConnect(descriptors, scheme.connect))
