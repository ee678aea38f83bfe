"""A checksum over all bytes of an update: it tells bytes that were changed by accident, not a forger's (see docs)."""

from __future__ import annotations

import struct
from typing import Any

import xxhash
from torch import Tensor

CHECKSUM = struct.Struct("<Q")


def checksum_of(flat: Tensor, extra: bytes) -> int:
    """The xxh3 checksum, 64 bits, of a flat buffer ``uint8[nbytes]`` and the extra state that goes with it.

    A buffer on a GPU is copied to the host for it, once the current stream has written it.
    """
    content: Any = flat.detach().cpu().numpy()  # a Buffer, which its type does not say
    digest = xxhash.xxh3_64_intdigest(content)
    return xxhash.xxh3_64_intdigest(extra, digest) if extra else digest


def seal(content: Any) -> bytes:
    """``checksum_of`` bytes in the main memory that come without extra state, as it travels."""
    return CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))


def damage(version: int, flat: Tensor, extra: bytes, expected: int) -> str:
    """What is wrong with an update that had the checksum ``expected`` when it was packed; empty if nothing is."""
    found = checksum_of(flat, extra)
    if found == expected:
        return ""
    return f"update {version} arrived corrupt (checksum {found:016x}, not {expected:016x}): nothing was applied"
