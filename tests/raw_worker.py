"""A worker that speaks by raw bytes, so that it can say what no worker of ``wsync`` would."""

import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any

import msgspec

PROTOCOL = 103


class RawWorker:
    """Joins the sender of ``model`` in a store, with the secret of ``WSYNC_AUTHKEY``.

    Attributes:
        sent: the bytes of the handshake, as another process on the network sees them.
    """

    def __init__(self, store: Any, secret: str, model: str = "policy", worker: int = 0) -> None:
        place = json.loads(store.get(f"wsync/{model}/1"))
        self.socket = socket.create_connection((place["host"], place["port"]), timeout=10.0)
        hello = {"purpose": "weights", "name": model, "worker": worker, "protocol": PROTOCOL, "nonce": os.urandom(16)}
        body, key = msgspec.msgpack.encode(hello), hashlib.sha256(secret.encode()).digest()
        said = self.read(16) + body + f"{place['host']} {place['port']}".encode()

        def mac(role: bytes) -> bytes:
            return hmac.digest(key, b"wsync " + role + b"\0" + said, "sha256")

        self._key, self._number = mac(b"frames of the worker"), 0
        self.sent = struct.pack("<H", len(body)) + mac(b"worker") + body
        self.socket.sendall(self.sent)
        assert self.read(33) == b"\1" + mac(b"trainer")

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            assert part, "the trainer has closed the connection"
            data += part
        return data

    def receive(self) -> dict[str, Any]:
        """Return the next message, and after it the bytes of an update."""
        length = int.from_bytes(self.read(20)[:4], "little")
        message = msgspec.msgpack.decode(self.read(length))
        self.read(message.get("size", 0))
        return message

    def frame(self, kind: str, **fields: Any) -> bytes:
        body = msgspec.msgpack.encode({"type": kind, **fields})
        self._number += 1
        mac = hashlib.blake2b(self._number.to_bytes(8, "little") + body, key=self._key, digest_size=16).digest()
        return len(body).to_bytes(4, "little") + mac + body

    def say(self, kind: str, **fields: Any) -> None:
        self.socket.sendall(self.frame(kind, **fields))

    def join(self) -> None:
        """Take the settings, and the first weights."""
        assert self.receive()["type"] == "Settings"
        self.say("Fits")
        first = self.receive()
        self.say("State", received=first["version"], ready=first["version"], installed=first["version"])
