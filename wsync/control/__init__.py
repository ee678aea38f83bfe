"""Authenticated connections between a sender and its workers, and their messages.

Public: collectors use it too, for connections of their own.

- ``Listener`` and ``connect``: a listening socket (TCP, or a Unix socket) and a connection to it; both sides prove that
  they have the token of the ``Address`` before anything else is read.
- ``Connection``: framed messages; its ``descriptors`` become readable when a message arrives, or the process on the
  other side exits.
- ``WorkerConnections``: a sender's connections to all workers: registration, acknowledgements, deaths.
- ``seal`` and ``unseal``: authenticate an address, and encrypt its token, for places that other processes can read and
  write, such as a store.
- ``PeerProcess``: a descriptor that is readable once a process on this machine has exited.
"""

from wsync.control.address import Address
from wsync.control.connection import Connection
from wsync.control.dialing import connect
from wsync.control.listener import Listener, listen_on
from wsync.control.liveness import PeerProcess, own_identity
from wsync.control.messages import Kind, Message
from wsync.control.sealing import seal, unseal
from wsync.control.workers import WorkerConnections

__all__ = [
    "Address",
    "Connection",
    "Kind",
    "Listener",
    "Message",
    "PeerProcess",
    "WorkerConnections",
    "connect",
    "listen_on",
    "own_identity",
    "seal",
    "unseal",
]
