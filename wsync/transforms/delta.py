"""Exact differences between two versions: only bytes that have changed travel. One codec, for all media.

A difference is ``new XOR base`` of two packed versions, mostly zeros, and otherwise mostly the low bytes of numbers. So
the bytes are grouped by their place within a number (first all lowest bytes, …) and compressed by zstd.

    1 byte    bytes per number: 1, 2, 4 or 8
    rest      a zstd frame of as many bytes as the packed weights have

Which version is the base travels beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wsync.errors import missing_extra

_LARGEST_SHARE = 0.9  # a difference that is larger than this share of the weights is not used
_Bytes = bytes | bytearray | memoryview


class Delta:
    """Send only what has changed since the version that a worker has; at the end of ``send_transform``.

        DistributedWeightSyncScheme(send_transform=[Cast("bfloat16"), Delta()])

    A worker without the base gets the full weights, and so does every worker where the difference would not be smaller.
    Where nothing travels (shared memory), it has no effect.

    Args:
        level: zstd's level: larger is smaller and slower, negative is faster; 0 is zstd's default, which is 3.

    Raises:
        ImportError, ValueError: the package ``zstandard`` is missing; or zstd does not have that level.
    """

    def __init__(self, level: int = 1) -> None:
        limit = require_zstandard().MAX_COMPRESSION_LEVEL
        if not -limit <= level <= limit:
            raise ValueError(f"zstd has levels from -{limit} to {limit}, not {level}")
        self.level = level

    def __call__(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return weights

    def difference(self, old: _Bytes, new: _Bytes, width: int) -> bytes | None:
        """Return the difference of two packed versions; None if the full weights are hardly larger.

        ``width``: bytes per number, in most of the weights (``Layout.width``).
        """
        changed = np.frombuffer(old, np.uint64) ^ np.frombuffer(new, np.uint64)
        planes: Any = torch.from_numpy(changed.view(np.uint8)).view(-1, width).T.contiguous().numpy()
        compressor = require_zstandard().ZstdCompressor(level=self.level)
        content = compressor.compress(planes.data.cast("B"))
        return None if len(content) > _LARGEST_SHARE * len(new) else bytes([width]) + content


def apply_difference(base: _Bytes, payload: _Bytes, into: bytearray | memoryview) -> None:
    """Write the version that is ``payload`` away from ``base`` into ``into``, which may be ``base``.

    The caller compares the checksum. ValueError: it is malformed, or of another size; nothing was written.
    """
    zstandard, nbytes = require_zstandard(), len(base)
    frame = memoryview(payload)[1:]
    width = payload[0] if len(payload) else 0
    if width not in (1, 2, 4, 8):
        raise ValueError(f"the difference is malformed: a number has 1, 2, 4 or 8 bytes, not {width}")
    try:
        if zstandard.frame_content_size(frame) != nbytes:  # before memory is allocated for it
            raise ValueError(f"the difference is not one of {nbytes} bytes")
        planes = np.empty((width, nbytes // width), np.uint8)
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            complete = reader.readinto(planes.reshape(-1).data) == nbytes
    except zstandard.ZstdError as error:
        raise ValueError(f"the difference is malformed: {error}") from error
    if not complete:
        raise ValueError("the difference is malformed: it ends too early")
    changed = torch.from_numpy(planes).T.contiguous().view(-1).numpy().view(np.uint64)
    np.bitwise_xor(np.frombuffer(base, np.uint64), changed, out=np.frombuffer(into, np.uint64))


def require_zstandard() -> ModuleType:
    """Return the package ``zstandard``; ImportError: it is missing."""
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise missing_extra(error, "delta") from error
    return zstandard
