"""Mutual authentication by a shared token, which is never transmitted.

A worker sends a *claim*: a nonce and an HMAC of it. The sender answers with a *proof*: another HMAC of the same nonce.
Both HMACs include the address that the worker connected to, so a process that has taken over a former sender's address
cannot forward a worker's claim to another sender. The messages that follow are neither authenticated nor encrypted.
"""

from __future__ import annotations

import hmac
import secrets

TOKEN_SIZE = 16  # bytes
_NONCE_SIZE = 16  # bytes
_MAC_SIZE = 32  # bytes, SHA-256
CLAIM_SIZE = _NONCE_SIZE + _MAC_SIZE


def new_token() -> bytes:
    """Return a random token."""
    return secrets.token_bytes(TOKEN_SIZE)


def new_claim(token: bytes, address: bytes) -> bytes:
    """Return a new claim of a worker for the listener at ``address``: ``CLAIM_SIZE`` bytes."""
    nonce = secrets.token_bytes(_NONCE_SIZE)
    return nonce + _mac(token, b"worker", address, nonce)


def is_valid(claim: bytes, token: bytes, address: bytes) -> bool:
    """Return whether a claim was made with ``token`` for ``address``. Constant-time comparison."""
    nonce, mac = claim[:_NONCE_SIZE], claim[_NONCE_SIZE:]
    return hmac.compare_digest(mac, _mac(token, b"worker", address, nonce))


def proof_for(claim: bytes, token: bytes, address: bytes) -> bytes:
    """Return the sender's proof for a claim; compare it with ``hmac.compare_digest``."""
    return _mac(token, b"trainer", address, claim[:_NONCE_SIZE])


def _mac(token: bytes, role: bytes, address: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, b"\0".join((b"wsync", role, address, nonce)), "sha256")
