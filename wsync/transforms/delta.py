"""Exact differences between two versions: only bytes that have changed travel.

A difference is ``new XOR base`` of two packed versions. Bytes that have not changed become zeros; of those that have,
mostly the low ones of each number differ. So the bytes are grouped by their place within a number (first all lowest
bytes, …) and compressed by zstd. The result of ``apply_difference`` is ``new``, bit for bit.

    8 bytes   the version of the base
    1 byte    bytes per number: 1, 2, 4 or 8
    rest      a zstd frame of as many bytes as the packed weights have
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_HEADER = struct.Struct("<QB")
_LARGEST_SHARE = 0.9  # a difference that is larger than this share of the weights is not used


class Delta:
    """Send only what has changed since the version that a worker has; at the end of ``send_transform``.

        DistributedWeightSyncScheme(send_transform=[Cast("bfloat16"), Delta()])

    Unlike other transforms it does not change weights: it is about how packed weights are encoded on their way. A
    worker that has not acknowledged a base gets the full weights: one that has just connected, or has refused an
    update. So does every worker where the difference would not be smaller. Where nothing travels (shared memory), it
    has no effect.

    Args:
        level: zstd's level: larger is smaller and slower, negative is faster; 0 is zstd's default, which is 3.
        threads: the number of zstd's threads; 0: the calling thread compresses.

    Raises:
        ImportError: the package ``zstandard`` is missing.
        ValueError: zstd does not have that level.
    """

    def __init__(self, level: int = 1, threads: int = 0) -> None:
        limit = require_zstandard().MAX_COMPRESSION_LEVEL
        if not -limit <= level <= limit:
            raise ValueError(f"zstd has levels from -{limit} to {limit}, not {level}")
        self.level = level
        self.threads = threads

    def __repr__(self) -> str:
        return f"Delta(level={self.level}, threads={self.threads})"

    def __call__(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return ``weights``: see the class."""
        return weights

    def difference(self, base: Tensor, base_version: int, new: Tensor, width: int) -> bytes | None:
        """Return the difference between two packed versions; None if the full weights are hardly larger.

        Args:
            base: ``uint8[nbytes]``.
            base_version: its number.
            new: ``uint8[nbytes]``, on the same device.
            width: bytes per number, in most of the weights: 1, 2, 4 or 8 (``Layout.width``).
        """
        changed = (base.view(torch.int64) ^ new.view(torch.int64)).view(torch.uint8)
        planes: Any = changed.view(-1, width).T.contiguous().view(-1).cpu().numpy()
        compressor = require_zstandard().ZstdCompressor(level=self.level, threads=self.threads)
        content = compressor.compress(planes.data)
        if len(content) > _LARGEST_SHARE * new.numel():
            return None
        return _HEADER.pack(base_version, width) + content


def base_of(difference: bytes | memoryview) -> int:
    """Return the version of the base.

    Raises:
        ValueError: ``difference`` is malformed.
    """
    if len(difference) < _HEADER.size:
        raise ValueError(f"a difference has at least {_HEADER.size} bytes, not {len(difference)}")
    return _HEADER.unpack_from(difference)[0]


def apply_difference(difference: bytes | memoryview, base: Tensor, new: Tensor) -> None:
    """Write the version that is ``difference`` away from ``base`` into ``new``. The caller compares the checksum.

    Args:
        difference: as ``Delta.difference`` returned it.
        base: ``uint8[nbytes]``, the packed version that ``base_of`` names.
        new: ``uint8[nbytes]``, on the same device; may be ``base``, which then becomes the new version.

    Raises:
        ValueError: ``difference`` is malformed, or of weights of another size.
        ImportError: the package ``zstandard`` is missing.
    """
    base_of(difference)
    width, nbytes, zstandard = _HEADER.unpack_from(difference)[1], base.numel(), require_zstandard()
    if width not in (1, 2, 4, 8):
        raise ValueError(f"a number has 1, 2, 4 or 8 bytes, not {width}")
    try:
        frame = memoryview(difference)[_HEADER.size :]
        if zstandard.frame_content_size(frame) != nbytes:  # before memory is allocated for it
            raise ValueError(f"the difference is not one of {nbytes} bytes")
        content = bytearray(nbytes)
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            complete = reader.readinto(content) == nbytes
    except zstandard.ZstdError as error:
        raise ValueError(f"the difference is malformed: {error}") from error
    if not complete:
        raise ValueError("the difference is malformed: it ends too early")
    planes = torch.frombuffer(content, dtype=torch.uint8).view(width, -1)
    changed = planes.T.contiguous().view(-1).to(base.device)
    torch.bitwise_xor(base.view(torch.int64), changed.view(torch.int64), out=new.view(torch.int64))


def require_zstandard() -> Any:
    """Return the package with which differences are made and read.

    Raises:
        ImportError: it is missing; says how to install it.
    """
    try:
        return import_module("zstandard")
    except ImportError as error:
        raise ImportError("Delta() needs the package zstandard at both ends: pip install zstandard") from error
