"""How two processes over a network show each other that they know a run's token, without telling it to a stranger.

A worker's claim is a random number and an HMAC of it; the trainer's proof is another HMAC of the same number. Both are
made of the address that was dialled, too: who listens where a trainer once was learns nothing that opens another door.
The words themselves are neither signed nor encrypted.
"""

from __future__ import annotations

import hmac
import secrets

_NUMBER = 16  # bytes
_MAC = 32  # bytes, of SHA-256
CLAIM = _NUMBER + _MAC
PROOF = _MAC


def new_claim(token: bytes, where: bytes) -> bytes:
    """What a worker says to whoever listens at ``where``."""
    number = secrets.token_bytes(_NUMBER)
    return number + _mac(token, b"worker", where, number)


def holds(claim: bytes, token: bytes, where: bytes) -> bool:
    """Whether a claim was made with ``token``, for ``where``."""
    number, mac = claim[:_NUMBER], claim[_NUMBER:]
    return hmac.compare_digest(mac, _mac(token, b"worker", where, number))


def proof_for(claim: bytes, token: bytes, where: bytes) -> bytes:
    """What the trainer answers a claim with; compare it with ``hmac.compare_digest``."""
    return _mac(token, b"trainer", where, claim[:_NUMBER])


def _mac(token: bytes, role: bytes, where: bytes, number: bytes) -> bytes:
    return hmac.digest(token, b"\0".join((b"wsync", role, where, number)), "sha256")
