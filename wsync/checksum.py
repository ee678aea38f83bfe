"""A checksum of all bytes of an update: finds accidental changes, and tells one version from another."""

from __future__ import annotations

import struct
from typing import Any

import xxhash
from torch import Tensor

CHECKSUM = struct.Struct("<Q")


def checksum_of(flat: Tensor, extra: bytes) -> int:
    """Return the xxh3 checksum (64 bits) of a flat buffer ``uint8[nbytes]`` and the extra state that goes with it.

    A buffer on a GPU is copied to the host first, after what the current stream has queued.
    """
    content: Any = flat.numpy(force=True)  # numpy's stubs do not call it a Buffer
    digest = xxhash.xxh3_64_intdigest(content)
    return xxhash.xxh3_64_intdigest(extra, digest) if extra else digest


def find_damage(version: int, flat: Tensor, extra: bytes, expected: int) -> str:
    """Return what is wrong with an update that had the checksum ``expected`` when packed; empty if nothing is."""
    found = checksum_of(flat, extra)
    if found == expected:
        return ""
    return f"update {version} arrived corrupt (checksum {found:016x}, not {expected:016x}): nothing was applied"
