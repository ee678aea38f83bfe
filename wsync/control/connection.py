"""Framed messages over an authenticated socket, Unix or TCP.

When a process exits, its socket closes, which wakes every wait of the peer. A forked child may keep a copy of it open,
so on one machine the peer also watches the process's pidfd (a descriptor that is readable once a process has exited).
If a whole machine fails, or the network to it, the connection is shut down after about ten seconds, or later if the
peer had stopped reading before the failure: see ``tcp_watch.py``. A stopped or busy peer, which does not read, stays
connected.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import weakref
from array import array
from collections.abc import Sequence
from contextlib import suppress

from wsync.control.liveness import PeerProcess
from wsync.control.messages import HEADER_SIZE, Message, payload_length, unpack
from wsync.control.outbox import Outbox, Parts
from wsync.control.receiver_thread import MessageHandler, receiver_thread
from wsync.control.tcp_watch import tcp_watch
from wsync.deadlines import NOW, wait_readable
from wsync.errors import NotConnected

# SO_RCVTIMEO, SO_SNDTIMEO: after 5 s without progress ``receive`` fails, and the outbox tries again to send.
STALL_TIMEOUT = struct.pack("ll", 5, 0)
_MAX_PAYLOAD = 1 << 30  # bytes
_CHUNK = 1 << 20  # bytes; payloads are read in chunks, so that a false length in a header does not allocate memory
# Plain numbers, computed once: ``|`` and ``&`` of two flags are slow Python code.
_WAIT, _NO_WAIT = int(socket.MSG_NOSIGNAL), int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_FD_SPACE, _FDS_LOST = socket.CMSG_SPACE(4 * 4), int(socket.MSG_CTRUNC)  # space for four descriptors


def close_socket(sock: socket.socket, opener_pid: int) -> None:
    """Close ``sock``; shut it down first if this process has opened it, but not in a forked child."""
    if os.getpid() == opener_pid:
        with suppress(OSError):  # already closed, by either side
            sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class Connection:
    """One side of the connection between a sender and one worker, over a stream socket.

    The first ``send`` (on the sender it also sends the preamble) must return before other threads call ``send``. After
    that, any thread may call ``send``, ``flush`` and ``interrupt``; a lock inside keeps messages whole. One thread at a
    time calls ``receive``: on the sender the thread that holds the channel's lock (``SenderSideChannel``); in a worker
    the thread that connects, and then the receiver thread.

    The compiled fast path sends and receives whole messages on the socket (``fileno()``) itself: on the sender under
    the sender's lock; in a worker the receiver thread receives, and the installing thread answers inside the gate.

    Args:
        sock: connected; owned by this object.
        peer: the other process.
        preamble: on the sender, sent before the first message: a proof that it has the token, then the length and the
            bytes of its ``own_identity()``.
        expected_proof: in a worker, the proof with which the preamble must begin. The identity that follows it names
            the process to watch.
    """

    def __init__(
        self, sock: socket.socket, peer: PeerProcess, *, preamble: bytes = b"", expected_proof: bytes = b""
    ) -> None:
        self._socket = sock
        self._opener = os.getpid()
        self._peer = peer
        self._preamble = preamble
        self._expected_proof = expected_proof
        # What has arrived of the message that is being read: if a signal handler raises while ``receive`` waits for the
        # rest of a long message, the next call continues.
        self._header: list[bytes] = []
        self._payload: list[bytes] = []
        self._fds: list[int] = []
        self._outbox = Outbox(self._send_some)
        self._finalizer = weakref.finalize(self, close_socket, sock, self._opener)
        self._finalizer.atexit = False
        sock.setblocking(True)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, STALL_TIMEOUT)
        self._where = "a process of this machine"
        if sock.family != socket.AF_UNIX:
            host, port, *_ = sock.getpeername()
            self._where = f"{host} port {port}"
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tcp_watch().add(sock)

    @property
    def peer_name(self) -> str:
        """A description of the other process, for error messages."""
        return f"process {self._peer.pid}" if self._peer.pid >= 0 else self._where

    @property
    def passes_descriptors(self) -> bool:
        """Whether messages may carry open descriptors (Unix sockets)."""
        return self._socket.family == socket.AF_UNIX

    @property
    def descriptors(self) -> Sequence[int]:
        """Descriptors that become readable when a message arrives or the peer exits.

        ``fileno()``, and the peer's pidfd if it runs on this machine.
        """
        return (self._socket.fileno(), *self._peer.descriptors)

    @property
    def busy(self) -> bool:
        """Whether a background thread is sending earlier messages, or has failed: the fast path must not send then."""
        return self._outbox.busy

    @property
    def local_host(self) -> str:
        """The IP address by which the peer reaches this side; loopback for a Unix socket."""
        return "127.0.0.1" if self.passes_descriptors else self._socket.getsockname()[0]

    @property
    def room_when_empty(self) -> int:
        """The bytes that fit into the empty socket: half of SO_SNDBUF (the rest is for the kernel)."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2

    def fileno(self) -> int:
        """Return the socket's descriptor: readable when ``receive`` has something to return; negative once closed."""
        return self._socket.fileno()

    def send(self, message: Message, *, may_drop: bool = False) -> None:
        """Send one message, without waiting for the peer to read it.

        If the socket is full, a background thread sends the rest and all later messages.

        Args:
            message: the message.
            may_drop: drop the message if the socket has no room, or very many are queued. Used for an ``UPDATE`` that
                only wakes the peer to read the arena: the earlier messages, which it has not read yet, wake it as well.

        Raises:
            ConnectionError: the peer has disconnected; or this is a forked child of the process that connected.
            ValueError: the payload is longer than 1 GiB.
        """
        self._require_opener()
        if len(message.payload) > _MAX_PAYLOAD:
            raise ValueError(f"a payload has at most {_MAX_PAYLOAD} bytes, not {len(message.payload)}: send parts")
        preamble, self._preamble = self._preamble, b""
        try:
            if preamble:
                # In a sendmsg of its own: descriptors arrive with the first byte of a sendmsg, and the peer closes
                # those that arrive while it reads the preamble.
                self._outbox.put([preamble])
            self._outbox.put(message.parts(), message.fds, may_drop=may_drop)
        except ConnectionError:  # also if no thread could be started: possibly half a message was sent
            self.interrupt()  # the next read reports it
            raise

    def interrupt(self) -> None:
        """End the connection as if the peer had disconnected: what has arrived can be read. Any thread may call it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def flush(self, deadline: float | None = None) -> None:
        """Wait until all messages of earlier calls are in the socket. Call it before ``close``.

        It returns at the deadline, whether or not they are.

        Raises:
            ConnectionError: the connection has broken.
        """
        self._outbox.flush(deadline)

    def _require_opener(self) -> None:
        if os.getpid() != self._opener:
            raise ConnectionError("this connection belongs to the parent of this forked process")

    def _send_some(self, parts: Parts, fds: Sequence[int], sent: list[int], *, wait: bool) -> None:
        """Send what the socket has room for, see ``Outbox``; with ``wait``, wait for room until the stall timeout."""
        flags = _WAIT if wait else _NO_WAIT
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            # One call in C that sends and records the bytes, see `Outbox`. socket.send_fds() ignores its flags.
            sent.extend(map(self._socket.sendmsg, [parts], [rights], [flags]))
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionError(f"{self.peer_name} cannot be reached: {error}") from error

    def receive(self) -> Message | None:
        """Return the next message, once ``fileno()`` is readable.

        Returns:
            None if the peer has disconnected, has sent something unreadable, or has sent nothing for five seconds in
            the middle of a message.

        Raises:
            NotConnected: the peer did not prove that it has the token; or this process has no descriptor left.
        """
        try:
            if self._expected_proof:
                self._check_proof()
            header = self._read(HEADER_SIZE, self._header, self._fds)
            length = payload_length(header)
            if length <= _MAX_PAYLOAD:
                message = unpack(header, self._read(length, self._payload, self._fds), tuple(self._fds))
                self._header, self._payload, self._fds = [], [], []
                return message
        except (OSError, ValueError):  # disconnected, stalled or garbage: the connection is unusable
            pass
        self._close_received_fds()
        return None

    def _close_received_fds(self) -> None:
        with suppress(IndexError):  # pop() gives each descriptor to one thread, if two call this
            while True:
                os.close(self._fds.pop())

    def _check_proof(self) -> None:
        shown = self._read(len(self._expected_proof))
        if not hmac.compare_digest(shown, self._expected_proof):
            raise NotConnected(f"{self._where} is not the sender of this run: it does not have the token")
        self._expected_proof = b""
        identity = self._read(int.from_bytes(self._read(2), "little"))
        if not self._peer.descriptors:
            try:
                self._peer = PeerProcess(identity)
            except OSError as error:
                raise NotConnected(f"the sender's process cannot be watched: {error}") from error

    def _read(self, count: int, parts: list[bytes] | None = None, fds: list[int] | None = None) -> bytes:
        """Return exactly ``count`` bytes. ConnectionError: the peer disconnected first.

        Args:
            count: how many.
            parts: those that have arrived already; more are appended as they arrive.
            fds: descriptors that arrive are appended to it; without it they are closed.
        """
        parts = [] if parts is None else parts
        missing = count - sum(map(len, parts))
        while missing > 0:
            data, attached, flags = self._recv(min(missing, _CHUNK))
            for fd in attached:
                os.close(fd) if fds is None else fds.append(fd)
            if flags & _FDS_LOST:
                self._close_received_fds()
                raise NotConnected(f"cannot receive files from {self.peer_name}: too many open files in this process")
            if not data:
                raise ConnectionError("the peer has disconnected")
            parts.append(data)
            missing -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _recv(self, count: int) -> tuple[bytes, Sequence[int], int]:
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(count, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # a Unix peer closed with unread data; what it sent before can still be read
            data, ancillary, flags, _ = self._socket.recvmsg(count, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        return data, [fd for _, _, packed in ancillary for fd in struct.unpack(f"{len(packed) // 4}i", packed)], flags

    def attach(self, handler: MessageHandler) -> None:
        """In a worker: from now on ``handler.on_readable()`` is called for each message, and when the peer exits.

        The process's receiver thread makes these calls. ConnectionError: this side was closed.
        """
        if self.fileno() < 0:
            raise ConnectionError("this connection was closed")
        receiver_thread().register(handler, self.fileno(), self.descriptors)

    def detach(self, handler: MessageHandler) -> None:
        """Undo ``attach``. On return no call of the handler is running, unless the handler itself called ``detach``.

        Called outside the gate, for which the handler may be waiting.
        """
        receiver_thread().unregister(handler)

    def has_ended(self) -> bool:
        """Return whether the peer has closed the connection or exited; what it sent before may not be read yet.

        Called by ``connect`` in a worker that is connected already.
        """
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return True
        poller = select.poll()
        poller.register(descriptor, select.POLLRDHUP)
        return bool(poller.poll(0)) or bool(wait_readable(self._peer.descriptors, NOW))

    def close(self) -> None:
        """Close this side. Idempotent. Any thread may call it: on the sender a finalizer may do so in any thread."""
        if self._socket.fileno() >= 0:
            self._finalizer.detach()  # and close here: at interpreter exit, calling the finalizer would do nothing
            if os.getpid() == self._opener:  # a forked child has none of the threads
                tcp_watch().remove(self._socket)
                self.interrupt()  # ends the outbox's thread, which must not use the descriptor's number after close()
                self._outbox.close()
            close_socket(self._socket, self._opener)
            self._close_received_fds()
            self._peer.close()
