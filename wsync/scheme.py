"""A scheme carries one model's weights from the trainer to its workers. The class is the same at both ends.

    trainer   init_on_sender ─→ (pickled to the workers) ─→ connect ─→ send, send, … ─→ shutdown
    worker    init_on_receiver ─→ connect ─→ updates arrive, between two forwards ─→ shutdown

A backend is a subclass that names a transport (``create_transport``) and, where workers do not connect by the address
in the pickled scheme, a rendezvous (``create_rendezvous``). What it may override is in ``scheme_base.py``.

In a worker the *acting thread* runs the forwards inside the *gate* (``wsync/gate.py``), where updates are installed;
the *receiver thread*, one per process, reads the senders' messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from tensordict import TensorDictBase
from torch import nn

from wsync import assembly
from wsync.control.processes import Process, Processes, watched
from wsync.deadlines import deadline_in
from wsync.errors import NotConnected
from wsync.legacy import api as older
from wsync.legacy.pipes import invite_all, pipes_of
from wsync.registry import load_backend
from wsync.roles import ReceiverRole, Role, SenderRole
from wsync.scheme_base import SchemeBase
from wsync.sending.counting import agreed_count
from wsync.sending.membership import checked_worker_index
from wsync.sending.source import DeviceMap
from wsync.types import CollectorContext, SyncReport
from wsync.weights.targets import Load


class WeightSyncScheme(SchemeBase):
    """Carries one model's weights from a trainer to its workers. For options see ``wsync.scheme_base.SchemeBase``."""

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
        """Set up the trainer's end. No weights are sent or copied; with ``pipes``, workers are sent the address.

        Args:
            model_id: the model's name, and its dotted path in ``context``.
            context: a collector, or any object that has the model.
            model: the model; read again by each ``send()`` without arguments.
            weights: the weights themselves, instead of a model; likewise read again by each ``send()``.
            devices: one per worker; only their number is used (an argument of TorchRL's).
            device_map_fn: ``(worker_idx, weights) -> weights``: returns the weights of one worker; they may be on any
                device. Called for each worker that an update is for, by the thread that calls ``send`` or ``connect``.
            num_workers: by default the number of ``devices``, ``params_map``, ``pipes``, the context's workers, or
                ``urls`` (of the backend ``http``); else 1.
            params_map: ``{worker_idx: weights}``, for workers that are to have different ones.
            pipes: one to each worker; for the older API, see ``wsync.legacy``.

        Raises:
            RuntimeError: the scheme is initialised already.
            TypeError, ValueError: an argument has a wrong type; or arguments contradict one another.
        """
        self._role.require_uninitialised()
        model, source_weights = assembly.model_and_weights(context, model_id, model, weights, params_map)
        pipes = pipes_of(context, pipes)
        workers = context.remote_workers if isinstance(context, CollectorContext) else ()
        count_by_option = {**self._implied_worker_counts(), **({"pipes": len(pipes)} if pipes else {})}
        count = agreed_count(num_workers, devices, params_map, workers, count_by_option)
        sentinels = {worker.worker_idx: worker.sentinel for worker in workers}
        sender = self._open_sender(model_id, self._make_source(model_id, source_weights, device_map_fn), count)
        self._role = SenderRole(model_id=model_id, context=context, model=model, sender=sender, sentinels=sentinels)
        assembly.close_when_abandoned(self._role)  # closes the channel if shutdown() is never called
        if pipes:
            self._pipes[:] = pipes  # the same list object: transports of the older API refer to it
        invite_all(self, pipes)  # send each worker the address through its pipe

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
            model_id: the model's name, and its dotted path in ``context``.
            context: an object that has the model. If it has workers of its own, its ``cascade_weights(model_id)`` (or
                ``update_policy_weights_``) is called after an update is installed and before it is acknowledged (of
                several, for the newest): outside the gate, by the receiver thread or the thread in ``connect``.
            model: the model itself, or a mapping of tensors into which weights are copied. A module in memory shared
                with another process is first given memory of its own: that process's model must not change.
            load: for an inference engine: called inside the gate, by the thread that installs, with an iterator over
                the ``(name, tensor)`` pairs of a version; they are valid during the call. ``model`` is then optional.
            chunk_bytes: call ``load`` several times for one version, with at most so many bytes (or one tensor) each.
            worker_idx: this worker's index; otherwise ``connect`` is given it.

        Raises:
            RuntimeError: initialised already; or the scheme has no sender's address and no torch store with one.
            LookupError, TypeError: the context has no such model.
            ValueError: another ``model_id`` than the sender's; no model, context or ``load``; or a context with workers
                of its own, and ``send`` awaits no acknowledgements (``published``, pull mode, ``store``).
        """
        self._make_ready_for_receiver()
        if self._sender_model_id not in (None, model_id):
            raise ValueError(f"the sender of this scheme sends '{self._sender_model_id}', not '{model_id}'")
        model, receiver = assembly.make_receiver(self, model_id, context, model, load, chunk_bytes)
        self._role = ReceiverRole(model_id=model_id, context=context, model=model, receiver=receiver, index=worker_idx)

    def init_in_process(self, model_id: str, model: nn.Module, source: Any = None) -> None:
        """Set up and connect both ends in this process.

        An update is installed inside the gate before ``send`` returns. If ``source`` is given, its weights are
        installed in ``model`` at once, and ``send()`` reads it again; else ``send`` has to be given weights.

        Raises:
            RuntimeError: the scheme is initialised already.
            LayoutMismatch: the source does not fit the model.
        """
        self._role.require_uninitialised()
        self._role = assembly.connect_in_process(self, model_id, model, source)

    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, processes: Processes | None = None
    ) -> None:
        """Wait until the other end calls ``connect`` too; deliver the first weights.

        A sender may call it again: it accepts late workers and replacements, and delivers to all.

        Args:
            worker_idx: on a receiver, this worker's index.
            weights: on the sender, first weights instead of the model's.
            processes: on the sender, the workers' processes, so that one that ends before it has connected is an error
                at once, with its exit code. ``docs/lifecycle.md`` has the forms: ``[process, …]``, ``{worker: …}``.

        Raises:
            NotConnected: not initialised; or the sender is gone, or rejected this worker.
            SyncTimeout: a worker did not connect or install the first weights in time; or the sender did not answer.
            WorkerDied, WorkerFailed: on the sender, naming the worker.
            LayoutMismatch, WeightSyncError: the weights do not fit a model, it raised an error, or the memory is full.
            TypeError, ValueError: a wrong form of ``processes``; no ``worker_idx``; an argument of the other end.
            RuntimeError: on a receiver that is connected already, or inside the gate.
        """
        role = self._role
        role.require_not_forked()
        if isinstance(role, SenderRole):
            role.reject_arguments(worker_idx=worker_idx)
            if self._address is not None and not role.sender.connected:
                self.create_rendezvous().announce(self._address, str(role.model_id), deadline_in(self.timeout))
            role.connect(weights, processes)
        elif isinstance(role, ReceiverRole):
            role.reject_arguments(weights=weights, processes=processes)
            role.connect(worker_idx, self.timeout, acknowledges=self.acknowledges)
        else:
            raise NotConnected("call init_on_sender() or init_on_receiver() before connect(), also after shutdown()")

    def disconnect(self, worker_idx: int) -> None:
        """On the sender: treat a worker as dead. See ``readmit``.

        If a call in another thread waits for this worker, that call raises ``WorkerDied``. If it waits only for others,
        this method waits for the end of that call, which with ``timeout=None`` may never come.
        """
        self._role.as_sender("disconnect").sender.disconnect(worker_idx)

    def readmit(self, worker_idx: int, process: Process | None = None, timeout: float | None = None) -> None:
        """On the sender: accept the process that replaces a dead worker; that process calls ``connect`` meanwhile.

        The replacement gets the newest update that was sent to this index. A replacement that connected in an earlier
        ``readmit`` is used, unless ``process`` has ended, or was started after that connection. Any other worker
        with this index is disconnected. ``timeout``: seconds, None for the scheme's.

        Raises:
            SyncTimeout, WorkerDied, WorkerFailed: it did not connect, or could not install the weights.
            TypeError, ValueError: ``process`` has a wrong form, see ``connect``; or there is no worker ``worker_idx``.
            NotConnected: this end is not initialised as a sender, or is a forked child of one.
        """
        sender = self._role.as_sender("readmit").sender
        worker = checked_worker_index(worker_idx, sender.num_workers)
        with watched(None if process is None else {worker: process}, sender.num_workers) as sentinels:
            sender.readmit(worker, sentinels.get(worker), timeout)

    def continue_from(self, version: int) -> None:
        """On the sender of a resumed run: number the next update at least ``version + 1``. ValueError: out of range."""
        self._role.as_sender("continue_from").sender.continue_from(version)

    def send(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, partial: bool = False
    ) -> SyncReport | None:
        """Deliver an update. When this returns, every forward that starts later in a worker uses it, or a newer one.

        It returns what the update has cost. With ``sync=False`` it is ``send_async``, and returns None. With
        ``initiator="receiver"`` it only makes the version available; the backend ``store`` writes it to a file.

        Args:
            weights: module, TensorDict, state dict, or ``{worker: any of these}``; None reads what was given at init.
            worker_ids: one, several, or (None) all workers.
            partial: whether ``weights`` are a part of the model; the rest keeps the values that were sent last.

        Raises:
            NotConnected: before ``connect``; or no worker is left; or there are no weights to send.
            LayoutMismatch, WeightSyncError: they do not fit the model; or the memory is full. No model was changed.
            ValueError: an unknown worker; or ``partial`` with ``worker_ids``, or when workers have different weights.
            WorkerDied, WorkerFailed, SyncTimeout: names workers that lack version ``error.version`` (None: not sent).
        """
        role = self._role
        if not isinstance(role, SenderRole):  # tested here as well: saves a call per update
            role = role.as_sender("send")
        return role.sender.send(weights, worker_ids, self.sync, partial)

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send as ``send``, but do not wait. A newer update may replace this one. Also raises earlier calls' errors."""
        self._role.as_sender("send_async").sender.send(weights, worker_ids, wait=False)

    def wait_async(self) -> SyncReport | None:
        """Wait until all that was sent without waiting is installed; return the newest report, None if there is none.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: errors of the oldest failed update; call again for the rest.
        """
        return self._role.as_sender("wait_async").sender.wait()

    def receive(self, timeout: float | None = None) -> Any | None:
        """Wait for a version newer than the last one returned; at first, newer than the one ``connect`` delivered.

        Returns:
            The model's weights, of one version, not copied: a later update may be written into the same memory. With
            ``load=`` and no model, the version number. None after ``timeout`` seconds (by default there is no limit),
            and when the sender has shut down (``finished`` is then true) or this end has.

        Raises:
            NotConnected: the sender died, ended without ``shutdown``, or has disconnected this worker; or an earlier
                call has returned None because of a shutdown.
            WeightSyncError: the model may be mixed from two versions.
            RuntimeError: called inside a forward, or ``wsync.gate()``, where nothing is installed.
        """
        return self._role.as_receiver("receive").receiver.receive(timeout)

    def pull(self, timeout: float | None = None) -> int:
        """On a receiver: install the version that is the newest at the time of the call; return its number.

        It waits at most ``timeout`` seconds (None: no limit): with ``initiator="receiver"`` for that version, with
        ``"sender"`` only if none has arrived yet. The wait for a running forward, or for a store, is not limited.

        Raises:
            NotConnected: before ``connect``; the connection ended before the first version; or is lost, and the last
                version was returned already (by ``connect``, ``receive`` or ``pull``).
            SyncTimeout: none was sent within ``timeout``, or the newest one did not arrive in time.
            WeightSyncError: the newest version failed to install, or send_weights raised; or a store is unreadable.
            RuntimeError: called inside a forward, or ``wsync.gate()``.
        """
        return self._role.as_receiver("pull").receiver.pull(timeout)

    def shutdown(self) -> None:
        """Release connections, memory and threads. Idempotent. A worker's model keeps its weights, in its own memory.

        Updates sent without waiting may be lost: call ``wait_async`` first. The sender waits for a call in another
        thread; then up to five seconds for queued messages and HTTP requests, and up to two for each thread of a
        transport. In a worker, ``receive`` or ``pull`` may be running in another thread, and ends.

        Raises:
            RuntimeError: in a worker, inside the gate: the receiver thread may wait for it, so this would deadlock.
        """
        self._role.require_closable()
        role, self._role = self._role, Role()
        try:
            role.close()
        except BaseException:  # also KeyboardInterrupt: another call closes what is left
            self._role = role
            raise
        if isinstance(role, SenderRole):
            self._address = self._sender_model_id = None  # a worker keeps both: it may connect again

    # --- the older API: functions of ``wsync.legacy.api`` as methods ---

    init_on_worker, synchronize_weights = older.init_on_worker, older.synchronize_weights
    get_sender, create_sender = older.get_sender, older.create_sender
    get_receiver, create_receiver = older.get_receiver, older.create_receiver

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @classmethod
    def from_backend(cls, name: str, **options: Any) -> WeightSyncScheme:
        """Return the scheme of the backend ``name`` (``wsync.registry``); ``ValueError`` lists those that there are."""
        return load_backend(name)(**options)
