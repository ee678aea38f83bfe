"""A backend of one's own: the bytes of each version go through a queue of a ``multiprocessing`` manager.

A worker that is killed in a blocking ``get`` would keep the lock of a ``multiprocessing.Queue``, so this one never
waits. The manager's process outlives a trainer that is killed (SIGKILL).
"""

from contextlib import suppress
from multiprocessing import get_context
from queue import Empty

import wsync


class QueueTransport(wsync.TransportBackend):
    """Puts the bytes of each version into the queue of one worker."""

    def __init__(self, queues, worker):
        self.queues = queues
        self.worker = worker

    def setup_connection_and_weights_on_sender(self):
        with suppress(Empty):
            while True:
                self.queues[self.worker].get_nowait()  # what a worker that was killed has not read

    def send_weights(self, weights):
        self.queues[self.worker].put(bytes(wsync.bytes_of(weights)))

    def receive_weights(self, timeout=None, *, weights=None, **_):
        try:
            wsync.bytes_of(weights)[:] = memoryview(self.queues[self.worker].get_nowait())
        except Empty:
            return None  # the next call comes when send_weights has returned
        return weights


class QueueScheme(wsync.WeightSyncScheme):
    """Weight synchronization by one queue per worker, for processes that ``multiprocessing`` has started."""

    name = "queues"
    manager = queues = None

    def init_on_sender(self, *args, **kwargs):
        manager = get_context("forkserver").Manager()  # it stops when it is released
        super().init_on_sender(*args, **kwargs)
        self.manager, self.queues = manager, manager.dict()

    def create_transport(self, worker_idx=None):
        if self.manager is not None and worker_idx not in self.queues:
            self.queues[worker_idx] = self.manager.Queue()
        return QueueTransport(self.queues, worker_idx)

    def shutdown(self):
        super().shutdown()
        if self.manager is not None:
            self.manager.shutdown()  # nothing happens in a forked child
            self.manager = self.queues = None  # they have open pipes

    def __getstate__(self):
        return {**super().__getstate__(), "manager": None}
