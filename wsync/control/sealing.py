"""Addresses in places that other processes can read and write, such as a ``torch.distributed`` store.

The token of a sealed address is encrypted, and the address is authenticated, with a secret: ``WSYNC_AUTHKEY``, or a
random key in a file that only the user can read, the same in all of the user's runs.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from wsync.control.address import Address
from wsync.errors import NotConnected

AUTHKEY = "WSYNC_AUTHKEY"
_KEY_SIZE = 32  # bytes
_NONCE_SIZE = 16


def key_file() -> Path:
    """Return where the key is: ``wsync/key`` in ``XDG_STATE_HOME``, by default ``~/.local/state``.

    Raises:
        NotConnected: this user has no home directory.
    """
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    try:
        return state.expanduser() / "wsync" / "key"
    except RuntimeError as error:
        raise NotConnected(
            f"{str(error).rstrip('.')}: set {AUTHKEY} instead to the same secret in all processes"
        ) from error


def shared_secret() -> bytes:
    """Return the secret that this user's processes share; the first call makes the key file.

    Raises:
        NotConnected: ``WSYNC_AUTHKEY`` is not set, and the key file cannot be made or read, or others can read it.
    """
    given = os.environ.get(AUTHKEY)
    if given:
        return given.encode()
    path = key_file()
    try:
        if not path.exists():
            _make(path)
        with path.open("rb") as file:
            state, key = os.fstat(file.fileno()), file.read()
    except OSError as error:
        raise NotConnected(
            f"cannot use the key file {path} ({error}): set {AUTHKEY} to the same secret in all processes instead"
        ) from error
    if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077 or len(key) != _KEY_SIZE:
        raise NotConnected(
            f"the key file {path} is damaged, or another user owns it or can read it: delete it, or set {AUTHKEY} to "
            "the same secret in all processes"
        )
    return key


def _make(path: Path) -> None:
    """Make the key file, atomically: several processes may do so at once."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_SIZE))
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink()


def seal(address: Address) -> str:
    """Return the address as JSON in which the token is encrypted with the secret: see ``unseal``.

    Raises:
        NotConnected: see ``shared_secret``.
    """
    secret, nonce = shared_secret(), secrets.token_bytes(_NONCE_SIZE)
    sealed = _apply_pad(address.token, secret, nonce)
    parts = [address.host, address.port, nonce.hex(), sealed.hex()]
    return json.dumps([*parts, _mac(secret, parts)])


def unseal(text: str | bytes) -> Address:
    """Decrypt and parse the output of ``seal``.

    Raises:
        ValueError: it is not one, or was made with another secret.
        NotConnected: see ``shared_secret``.
    """
    secret = shared_secret()
    try:
        *parts, mac = json.loads(text)
        host, port, nonce, sealed = parts
        genuine = isinstance(mac, str) and hmac.compare_digest(mac.encode(), _mac(secret, parts).encode())
        if genuine:
            return Address.checked(host, port, _apply_pad(bytes.fromhex(sealed), secret, bytes.fromhex(nonce)))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError("this is not the sealed address of a sender") from error
    raise ValueError(f"this address was sealed with another secret: {AUTHKEY}, or the user's key file, differs")


def _apply_pad(token: bytes, secret: bytes, nonce: bytes) -> bytes:
    """Encrypt or decrypt a token with a pad that is used once."""
    pad = hashlib.shake_256(hmac.digest(secret, b"wsync token" + nonce, "sha256")).digest(len(token))
    return bytes(a ^ b for a, b in zip(token, pad, strict=True))


def _mac(secret: bytes, parts: list[object]) -> str:
    return hmac.digest(secret, b"wsync address" + json.dumps(parts).encode(), "sha256").hex()
