"""The older API's senders and receivers, and its methods of a scheme."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from torch import nn

from wsync.deadlines import deadline_in, remaining, wait_readable
from wsync.errors import NotConnected, SyncTimeout
from wsync.gate import process_gate, without_forward
from wsync.legacy.pipes import read_invitation
from wsync.paths import find_or_none

if TYPE_CHECKING:
    from wsync.scheme import WeightSyncScheme
    from wsync.update import SyncReport


class WeightSender:
    """Sends one model's weights to its workers.

    Args:
        scheme: initialised on the sender before the first call.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._pipes: dict[int, Any] = {}

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Add a worker to a scheme that is not initialised; the first ``send`` initialises it, as ``"policy"``.

        Args:
            worker_idx: the worker's index.
            pipe_or_context: the pipe to it, or an object that has it as ``pipe``.

        Raises:
            RuntimeError: the scheme is initialised already.
            TypeError: neither a pipe nor such an object.
        """
        self._scheme._require_uninitialised()
        self._pipes[worker_idx] = _require_pipe(getattr(pipe_or_context, "pipe", pipe_or_context))

    def update_weights(self, weights: Any = None) -> SyncReport | None:
        """``send``, under its older name."""
        return self.send(weights)

    def _connect(self) -> None:
        """Wait for all workers, if that has not been done; workers that were registered define the scheme."""
        if self._pipes and self._scheme.model_id is None:
            if sorted(self._pipes) != list(range(len(self._pipes))):
                raise ValueError(f"workers are numbered from 0 without a gap, not {sorted(self._pipes)}")
            self._scheme.init_on_sender(pipes=[self._pipes[worker] for worker in sorted(self._pipes)])
        sender = self._scheme._sender
        if sender is not None and not sender.connected:
            self._scheme.connect()

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> SyncReport | None:
        """Deliver an update, as ``WeightSyncScheme.send`` does. The first one waits for every worker.

        Raises:
            NotConnected: ``init_on_sender`` has not been called.
            ValueError: workers were registered with a gap in their indices.
            SyncTimeout: names the workers that have not called ``init_on_worker`` within the scheme's ``timeout``; and
                all that ``WeightSyncScheme.send`` raises.
        """
        self._connect()
        return self._scheme.send(weights, worker_ids)

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send without waiting for the update; the first one waits for every worker, as ``send`` does."""
        self._connect()
        self._scheme.send_async(weights, worker_ids)

    def wait_async(self) -> SyncReport | None:
        """Wait until what ``send_async`` has sent is installed; raises as ``send``."""
        return self._scheme.wait_async()


class WeightReceiver:
    """Receives one model's weights in one worker.

    They are installed as they arrive, between two forwards, whether ``receive`` is called or not.

    Args:
        scheme: initialised on the worker before the first call.
    """

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._model: Any = None
        self._pipe: Any = None

    def register_model(self, model: nn.Module) -> None:
        """Set the model of a scheme that is not initialised; RuntimeError: it is."""
        _require_unused(self._scheme)
        self._model = model

    def register_worker_transport(self, pipe: Any) -> None:
        """Set the pipe of a scheme that is not initialised.

        With a model and a pipe, the first ``receive`` that finds the sender's message in the pipe initialises the
        scheme, as ``"policy"``.

        Raises:
            RuntimeError: the scheme is initialised already.
            TypeError: it is no pipe.
        """
        _require_unused(self._scheme)
        self._pipe = _require_pipe(pipe)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply ``weights`` to the model, inside the gate, as ``WeightSyncScheme.apply_weights`` does."""
        if self._scheme.model_id is None and self._model is not None:
            with without_forward(), process_gate().hold():
                self._scheme.strategy.apply_weights(self._model, weights, inplace=inplace)
        else:
            self._scheme.apply_weights(weights, inplace)

    def _begin(self, deadline: float | None) -> bool:
        """Initialise what was registered, if the sender's message is there in time; False if it is not."""
        if self._scheme.model_id is not None or self._model is None or self._pipe is None:
            return True
        if not wait_readable([self._pipe.fileno()], deadline):
            return False
        self._scheme.init_on_worker(pipe=self._pipe, model=self._model)
        return True

    def receive(self, timeout: float | None = None) -> bool:
        """Wait for weights newer than those of the last call; return whether there are any.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            NotConnected: ``init_on_worker`` has not been called; or the sender is gone.
            WeightSyncError: the sender's weights do not fit this model, or it rejected this worker.
        """
        deadline = deadline_in(timeout)
        if not self._scheme.sends_weights or not self._begin(deadline):
            return False
        receiver = self._scheme._receiver
        try:
            if receiver is not None:
                receiver.finish_connecting(remaining(deadline))
        except SyncTimeout:
            if receiver is not None and receiver._connecting is not None:  # else it has failed
                return False
            raise
        received = self._scheme.receive(remaining(deadline))
        if received is None and self._scheme.finished:
            raise NotConnected("the sender has shut down: there will be no more weights")
        return received is not None


def _require_pipe(given: Any) -> Connection:
    if not isinstance(given, Connection):
        raise TypeError(f"a worker is registered with a pipe, or an object with one, not a {type(given).__name__}")
    return given


def _require_unused(scheme: WeightSyncScheme) -> None:
    """Raise RuntimeError if the scheme is initialised in this process; a forked worker has the trainer's end, too."""
    if not scheme._inherited:
        scheme._require_uninitialised()


# --- methods of ``WeightSyncScheme`` ---


def synchronize_weights(scheme: WeightSyncScheme, *, worker_idx: int | None = None, weights: Any = None) -> None:
    """Connect: the older name of ``connect``, which delivers the first weights."""
    scheme.connect(worker_idx=worker_idx, weights=weights)


def create_sender(scheme: WeightSyncScheme) -> WeightSender:
    """Return the scheme's sender; may come before ``init_on_sender``."""
    return WeightSender(scheme)


def create_receiver(scheme: WeightSyncScheme) -> WeightReceiver:
    """Return the scheme's receiver; may come before ``init_on_worker``."""
    return WeightReceiver(scheme)


def get_sender(scheme: WeightSyncScheme) -> WeightSender:
    """Return the scheme's sender; ``NotConnected`` before ``init_on_sender``."""
    scheme._as_sender("get_sender")
    return scheme.create_sender()


def get_receiver(scheme: WeightSyncScheme) -> WeightReceiver:
    """Return the scheme's receiver; ``NotConnected`` before ``init_on_worker``."""
    scheme._as_receiver("get_receiver")
    return scheme.create_receiver()


def init_on_worker(
    scheme: WeightSyncScheme,
    model_id: str = "policy",
    context: Any = None,
    *,
    pipe: Any = None,
    model: nn.Module | None = None,
    worker_idx: int | None = None,
) -> None:
    """Set up and begin to connect a worker, without waiting for the sender. ``connect`` need not be called.

    Args:
        scheme: a worker's own, if there is a pipe; else the sender's, pickled.
        model_id: the model's name, and its path in ``context``.
        context: an object that has the model (under that name, or as ``model``); it may have ``worker_idx`` and
            ``pipe``.
        pipe: the other end of one that ``init_on_sender`` was given. Its message, which is waited for until the
            scheme's timeout, has the sender's address and this worker's index.
        model: the model itself.
        worker_idx: this worker's index, where there is no pipe.

    Raises:
        NotConnected: the sender is gone.
        SyncTimeout: ``init_on_sender`` was not called in time.
        ValueError: no index; or something else came through the pipe; and all that ``init_on_receiver`` raises.
    """
    pipe = getattr(context, "pipe", None) if pipe is None else pipe
    if pipe is not None:
        _require_unused(scheme)
        invited, scheme._address = read_invitation(pipe, model_id, scheme.timeout)
        if worker_idx not in (None, invited):
            raise ValueError(f"which worker is this? worker_idx: {worker_idx}, pipe: {invited}")
        worker_idx = invited
    if worker_idx is None:
        worker_idx = getattr(context, "worker_idx", None)
    if worker_idx is None:
        raise ValueError("which worker is this? give init_on_worker() a worker_idx, or a context that has it")
    if model is None and context is not None:
        model = find_or_none(context, model_id) or getattr(context, "model", None)
    scheme.init_on_receiver(model_id, context, model=model, worker_idx=worker_idx)
    try:
        scheme._as_receiver("init_on_worker").begin_connect(worker_idx, scheme.timeout)
    except BaseException:  # no thread could be started
        scheme.shutdown()
        raise
