"""A backend of one's own, for other machines: each version is a message over an authenticated TCP connection.

The connections of ``wsync.control`` authenticate both ends and each message; a bare socket would give the weights to
any process that connects. The scheme opens a listener for each worker when it is initialised on the sender, and
carries the addresses, with a random key, to the workers.
"""

import io
import time
import weakref

import torch

import wsync
from wsync.control import ChannelListener, connect_channel, readable


class SocketTransport:
    """Weights as one message over an authenticated connection. ``close`` ends every wait."""

    def __init__(self, listener, address, worker):
        self.listener, self.address, self.worker = listener, address, worker
        self.channel, self.closed = None, False

    def setup_connection_and_weights_on_sender(self):
        while not self.closed:
            accepted = self.listener.accept(time.monotonic() + 0.2)
            if accepted is None:
                continue
            self.channel, _ = accepted
            if self._answers():
                return
            self.channel.close()  # of a process that has died

    def _answers(self):
        try:
            self.channel.send(0, 0)
            return self._receive(2.0) is not None
        except ConnectionError:
            return False

    def setup_connection_and_weights_on_receiver(self, *, worker_idx=None, weights=None, model=None, strategy=None):
        deadline = time.monotonic() + 5.0
        self.channel = connect_channel(self.address, "sockets", self.worker, deadline, name=str(self.worker))
        while self._receive(0.2) is None:
            if self.closed:
                raise ConnectionError("closed")
        self.channel.send(0, 0)

    def send_weights(self, weights):
        state_dict, data = wsync.WeightStrategy("state_dict").extract_weights(weights), io.BytesIO()
        torch.save({name: tensor.clone() for name, tensor in state_dict.items()}, data)
        self.channel.send(0, 0, data.getvalue())

    def receive_weights(self, timeout=None, *, weights=None, model=None, strategy=None):
        frame = self._receive(timeout)
        return None if frame is None else torch.load(io.BytesIO(frame[2]), weights_only=True)

    def _receive(self, timeout):
        deadline = None if timeout is None else time.monotonic() + timeout
        return self.channel.receive() if readable([self.channel.fileno()], deadline) else None  # the whole message

    def close(self):
        self.closed = True
        if self.channel is not None:
            self.channel.close()


def close_all(listeners):
    """Close the listeners: when the scheme shuts down, or has gone without."""
    for listener in listeners:
        listener.close()  # does nothing in a forked child


class SocketScheme(wsync.WeightSyncScheme):
    """Weight synchronization by messages over TCP to ``host``, the sender's address."""

    name = "sockets"

    def __init__(self, host: str = "127.0.0.1", **options):
        super().__init__(**options)
        self.host = host
        self.addresses, self.listeners, self.release = [], [], None

    def create_rendezvous(self):
        return wsync.Rendezvous(self.host)  # the library's own connection, too, listens on TCP at this address

    def init_on_sender(self, *args, **options):
        super().init_on_sender(*args, **options)
        self.listeners = [ChannelListener("sockets", str(i), self.host) for i in range(self.num_workers)]
        self.addresses = [listener.address for listener in self.listeners]  # before a worker gets the scheme
        self.release = weakref.finalize(self, close_all, self.listeners)

    def create_transport(self, worker_idx=None):
        listener = self.listeners[worker_idx] if self.listeners else None
        return SocketTransport(listener, self.addresses[worker_idx], worker_idx)

    def shutdown(self):
        super().shutdown()
        if self.release is not None:
            self.release()
            self.listeners, self.release = [], None

    def __getstate__(self):
        return {**super().__getstate__(), "listeners": [], "release": None}  # sockets belong to their process
