"""A worker's side of the first contact: connecting to a sender's ``Listener``."""

from __future__ import annotations

import socket
import struct

from wsync.control.address import Address
from wsync.control.connection import STALL_TIMEOUT, Connection
from wsync.control.credentials import new_claim, proof_for
from wsync.control.liveness import own_identity, peer_of
from wsync.control.messages import MAX_HELLO, PROTOCOL, Kind, Message
from wsync.deadlines import milliseconds, remaining
from wsync.errors import NotConnected, SyncTimeout


def connect(address: Address, worker: int, deadline: float | None, payload: bytes = b"") -> Connection:
    """Connect to a listener and send the ``HELLO`` of worker ``worker``; does not wait for an answer.

    Called in a worker: by the thread in ``connect``, or (older API) in ``init_on_worker``; and by collectors.

    Args:
        address: the address of the listener.
        worker: the worker's index.
        deadline: on ``time.monotonic``'s clock; None for none.
        payload: returned by the peer's ``accept``; up to about 900 bytes.

    Raises:
        ValueError: the payload is too long; names the limit.
        NotConnected: no sender listens there (any more), or it cannot be reached.
        SyncTimeout: no connection by the deadline: the listener's queue of connection attempts is full, or (TCP) its
            machine does not answer.
    """
    claim = new_claim(address.token, address.public)
    expected = proof_for(claim, address.token, address.public)
    own = own_identity()
    hello = claim + struct.pack("<H", len(own)) + own
    if len(hello) + len(payload) > MAX_HELLO:
        raise ValueError(f"the payload has at most {MAX_HELLO - len(hello)} bytes, not {len(payload)}")
    sock: socket.socket | None = None
    try:
        sock = _open_socket(address, deadline)
        connection = Connection(sock, peer_of(sock, b""), expected_proof=expected)
        connection.send(Message(Kind.HELLO, worker, PROTOCOL, hello + payload))
        return connection
    except TimeoutError:
        raise SyncTimeout(f"worker {worker}: the sender at {address.host} did not answer in time") from None
    except BlockingIOError:
        raise SyncTimeout(
            f"worker {worker}: the sender accepts no connections, and its queue is full: "
            "does it call connect() or readmit()?"
        ) from None
    except OSError as error:
        if sock is not None:
            sock.close()
        where = f" at {address.host} port {address.port}" if address.host else ""
        raise NotConnected(
            f"worker {worker}: the sender{where} is gone, has been shut down, or cannot be reached ({error})"
        ) from error


def _open_socket(address: Address, deadline: float | None) -> socket.socket:
    if address.host:
        left = remaining(deadline)
        return socket.create_connection((address.host, int(address.port)), None if left is None else max(left, 0.001))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        left = milliseconds(deadline)
        # (seconds, microseconds); (0, 0): no limit
        limit = (0, 0) if left is None else divmod(max(1, int(left)) * 1000, 1_000_000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", *limit))
        sock.connect(b"\0" + str(address.port).encode())
    except BaseException:
        sock.close()
        raise
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, STALL_TIMEOUT)
    return sock
