"""The older API's pipes, for schemes whose workers run on the trainer's machine: an invitation goes through each.

The weights go another way, as ever; the pipe stays the user's own but for one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

from torch import nn

from wsync.counting import the_one_count
from wsync.local.invitation import await_invitation, invite
from wsync.ports import SendOnly
from wsync.roles import Worker
from wsync.scheme import WeightSyncScheme
from wsync.transport import TransportBackend
from wsync.weights.strategy import Format


@runtime_checkable
class PipesContext(Protocol):
    """A trainer's context that has a pipe to each worker."""

    pipes: Sequence[Connection]


@runtime_checkable
class PipeContext(Protocol):
    """A worker's context that has the pipe to the trainer."""

    pipe: Connection


class PipeTransport(SendOnly):
    """The sender's line to the worker at the other end of a pipe (a ``TransportBackend``): nothing need come before it.

    Args:
        scheme: initialised by the first call, if it was not, as ``"policy"`` with all pipes that it was given.
        worker_ids: whom; None for all.
    """

    def __init__(self, scheme: PipedScheme, worker_ids: Sequence[int] | None) -> None:
        self._scheme = scheme
        self._worker_ids = worker_ids

    def send_weights(self, weights: Any = None) -> None:
        """Deliver ``weights`` (None: the model's), once all workers are there."""
        self.setup_connection_and_weights_on_sender()
        self._scheme.send(weights, self._worker_ids)

    def setup_connection_and_weights_on_sender(self) -> None:
        """The rendezvous with every worker of the scheme, unless it has been."""
        if self._scheme.model_id is None:
            self._scheme.init_on_sender()
        self._scheme._meet()


class PipedScheme(WeightSyncScheme):
    """A scheme that can be given a pipe to each worker, and then need not be pickled to it.

    ``init_on_sender`` puts one message of some 200 bytes into each pipe, and ``init_on_worker`` takes it out. All else
    that goes through a pipe is the user's: what is sent before the one must be received before the other.
    """

    def __init__(
        self, strategy: Format = "tensordict", sync: bool = True, *, timeout: float | None = 60.0, bind: bool = True
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind)
        self._pipes: list[Connection] = []

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        pipes: Sequence[Connection] | None = None,
        **given: Any,
    ) -> None:
        """Set up the trainer's end: see ``WeightSyncScheme.init_on_sender``. With pipes, invite the workers.

        Args:
            model_id: the model's name.
            context: a collector; or what has the model, or ``pipes``.
            pipes: one to each worker, in the order of their indices.
            given: as there.

        Raises:
            NotConnected: a pipe is closed; names the worker.
            SyncTimeout: a pipe is full, and nobody reads it.
            ValueError: another number of workers than of pipes.
        """
        if pipes is None and isinstance(context, PipesContext):
            pipes = context.pipes
        pipes = self._pipes if pipes is None else list(pipes)
        if pipes:
            given["num_workers"] = the_one_count({"num_workers": given.get("num_workers"), "pipes": len(pipes)})
        super().init_on_sender(model_id, context, **given)
        self._pipes = pipes
        try:
            for worker, pipe in enumerate(pipes):
                invite(pipe, model_id, worker, self._seed, self.timeout)
        except Exception:
            self.shutdown()
            raise

    def init_on_worker(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        pipe: Connection | None = None,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
    ) -> None:
        """Set up a worker's end, and knock at the sender's door: see ``OlderApi.init_on_worker``.

        Args:
            model_id: the model's name, and its path in ``context``.
            context: what has the model, and maybe the ``pipe``.
            pipe: the other end of one that ``init_on_sender`` was given. Its message says where the sender is, and
                which worker this is; it is waited for, until ``timeout``.
            model: the model itself.
            worker_idx: this worker's index, where there is no pipe.

        Raises:
            NotConnected: the sender is gone.
            SyncTimeout: ``init_on_sender`` was not called in time.
            ValueError: something else came through the pipe; and all that ``init_on_receiver`` raises.
        """
        if pipe is None and isinstance(context, PipeContext):
            pipe = context.pipe
        if pipe is not None:
            self._require_fresh_worker()
            invited, self._seed = await_invitation(pipe, model_id, self.timeout)
            if worker_idx not in (None, invited):
                raise ValueError(f"which worker is this? worker_idx: {worker_idx}, pipe: {invited}")
            worker_idx = invited
        super().init_on_worker(model_id, context, model=model, worker_idx=worker_idx)

    def create_transport(
        self, pipe_or_context: Any = None, *, worker_ids: Sequence[int] | None = None
    ) -> TransportBackend:
        """The sender's line to some workers (None: all).

        Args:
            pipe_or_context: the older API's way to say whom. A pipe that is given before ``init_on_sender`` is kept
                for it, and the line makes up for what was not called.
            worker_ids: whom.

        Raises:
            ValueError: not a pipe of this scheme.
        """
        if not isinstance(pipe_or_context, Connection) or isinstance(self._role, Worker):
            return super().create_transport(pipe_or_context, worker_ids=worker_ids)
        if self._role is None and all(pipe is not pipe_or_context for pipe in self._pipes):
            self._pipes.append(pipe_or_context)
        for worker, pipe in enumerate(self._pipes):
            if pipe is pipe_or_context:
                return PipeTransport(self, self._behind(worker))
        raise ValueError("this scheme was not given that pipe: give init_on_sender() all of them, pipes=[…]")

    def _behind(self, worker: int) -> Sequence[int] | None:
        """Whom the line of a worker's pipe leads to."""
        return [worker]

    def shutdown(self) -> None:
        """Let everything go: see ``WeightSyncScheme.shutdown``. Pipes are the user's to close."""
        super().shutdown()
        self._pipes = []

    def __getstate__(self) -> dict[str, Any]:
        """Options and the way to the sender; pipes are things of this process."""
        return {**super().__getstate__(), "_pipes": []}
