"""How the two ends of a connection prove to each other that they have the same key, before anything else is read.

    trainer   Challenge: random bytes ──────────────────────────→ worker
    trainer   ←────────── Hello: what the worker is, random bytes, and a MAC of all that with both random bytes
    trainer   Proof: a MAC of the same with the other role ─────→ worker

The key is never sent. Both MACs cover the random bytes of the other end, so what was recorded in another connection is
worth nothing. They cover the names as well (the purpose of the connection, the model, the worker's index), so that what
was meant for one sender is not accepted by another one. The keys for the frames that follow come from the same bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from wsync.errors import NotConnected

PROTOCOL = 103
"""Of all messages: two ends have to be of one revision."""
NONCE_SIZE, PROOF_SIZE, MAX_HELLO = 16, 32, 2048
AUTHKEY = "WSYNC_AUTHKEY"
_RUN = "TORCHELASTIC_RUN_ID", "MASTER_PORT"  # by default, only the second differs between two runs


@dataclass(frozen=True, slots=True)
class Address:
    """Where a sender listens, and the key that a worker must have. A pickled scheme contains it.

    Attributes:
        host: an IP address or host name, by which workers on other machines reach it; empty for this machine only.
        port: of TCP; 0 for none.
        unix: the abstract name of its Unix socket, for workers on this machine; empty for none.
        key: secret. Empty in an address for a public place: the processes that read it there share a key.
    """

    host: str
    port: int
    unix: str
    key: bytes = field(repr=False, default=b"")

    @property
    def public(self) -> bytes:
        """What both ends know of the address, so not an IPv6 scope; their MACs cover it."""
        return (f"{self.host.partition('%')[0]} {self.port}" if self.port else self.unix).encode()

    def dump(self, *, public: bool = False) -> str:
        """Return the address as text; with the key, unless ``public``."""
        return msgspec.json.encode(replace(self, key=b"") if public else self).decode()

    @classmethod
    def load(cls, text: str | bytes) -> Address:
        """Parse the output of ``dump``; ValueError if ``text`` is something else."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError("this is not the address of a sender") from error


class Hello(msgspec.Struct, frozen=True):
    """What a worker says of itself."""

    purpose: str  # what the connection is for: ``"weights"``, or a collector's name for its own
    name: str  # of the model, or of the collector
    worker: int  # its index
    native: bool = False  # whether it has the compiled extension, without which it cannot use the arena
    inline: bool = False  # whether it takes weights only from the connection itself: a reader, without torch
    payload: bytes = b""  # for connections of a collector
    protocol: int = PROTOCOL
    nonce: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(NONCE_SIZE))


def proof_of(role: str, key: bytes, said: bytes) -> bytes:
    """Return the MAC by which ``role`` (``"worker"`` or ``"trainer"``) proves that it has the key.

    ``said``: the challenge, the encoded ``Hello``, and the public part of the address.
    """
    return hmac.digest(key, b"wsync " + role.encode() + b"\0" + said, "sha256")


def new_key() -> bytes:
    """Return a random key."""
    return secrets.token_bytes(32)


def shared_key(*, of_run: bool = True) -> bytes:
    """Return the key that this user's processes share: ``WSYNC_AUTHKEY``, or a file that only this user can read.

    ``of_run``: under ``torchrun``, that of this run alone. NotConnected: ``WSYNC_AUTHKEY`` is not set, and the file
    cannot be made or read, or others can read it.
    """
    if of_run and _RUN[0] in os.environ:
        run = "\0".join(os.environ.get(name, "") for name in _RUN)
        return hmac.digest(shared_key(of_run=False), b"run " + run.encode(), "sha256")
    if given := os.environ.get(AUTHKEY):
        return hashlib.sha256(given.encode()).digest()
    remedy = f"set {AUTHKEY} to the same secret in all processes instead"
    try:
        path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "wsync" / "key"
        if not path.exists():
            _make(path)
        with path.open("rb") as file:
            state, key = os.fstat(file.fileno()), file.read()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        raise NotConnected(f"the key file in ~/.local/state/wsync cannot be used ({error}): {remedy}") from error
    if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077 or len(key) != 32:
        raise NotConnected(f"the key file {path} is damaged, or others can read it: remove it, or {remedy}")
    return key


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(new_key())
    try:
        with suppress(FileExistsError):  # another process was faster
            os.link(temporary, path)
    finally:
        temporary.unlink()
