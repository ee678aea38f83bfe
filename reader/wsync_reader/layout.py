"""The errors, and one version of a model's weights: numpy arrays over a flat buffer."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from math import prod
from typing import Any, Self

import msgspec
import numpy as np
import xxhash

ALIGNMENT = 64  # bytes
_PLAIN = {f"{kind}{8 * size}" for kind in ("int", "uint") for size in (1, 2, 4, 8)}
_PLAIN |= {"bool", "float16", "float32", "float64", "complex64", "complex128"}
_OF_ML_DTYPES = {  # without that package, integers of their width
    **{"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e8m0fnu": "uint8"},
    **{"float8_e4m3fnuz": "uint8", "float8_e5m2fnuz": "uint8", "complex32": "uint32"},
}


class WeightSyncError(RuntimeError):
    """Base of everything that can go wrong on the way from a trainer to a reader; the names are those of ``wsync``."""


class NotConnected(WeightSyncError):
    """There is no version yet; or the trainer has ended, cannot be reached, or has refused this reader."""


class LayoutMismatch(WeightSyncError, ValueError):
    """Weights cannot be numpy arrays, or do not fit the model of an adapter; nothing was changed."""


class SyncTimeout(WeightSyncError, TimeoutError):
    """The deadline passed before the trainer answered, or before there was a version."""


@cache
def numpy_dtype(name: str) -> np.dtype:
    """Return the dtype of arrays for a dtype of torch (``"bfloat16"``); LayoutMismatch: there is none."""
    if name in _PLAIN:
        return np.dtype(name)
    if name not in _OF_ML_DTYPES:
        raise LayoutMismatch(f"the weights have the dtype {name!r}, which numpy arrays cannot have")
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        return np.dtype(_OF_ML_DTYPES[name])
    return np.dtype(getattr(ml_dtypes, name, _OF_ML_DTYPES[name]))


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name, dtype, shape, strides and place of every tensor of a model, as ``wsync.weights.layout`` has them."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]  # in elements
    dtypes: tuple[str, ...]  # without "torch."
    offsets: tuple[int, ...]  # in bytes
    ties: tuple[tuple[int, int], ...]  # pairs ``(follower, leader)`` of entries that are one tensor
    nbytes: int  # of the flat buffer
    extra: frozenset[str] | None
    model_may_have_more: bool

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the layout that ``wsync`` has encoded; ValueError: it is malformed; LayoutMismatch: an odd dtype."""
        new = msgspec.msgpack.decode(data, type=cls)
        columns, count = (new.names, new.shapes, new.strides, new.dtypes, new.offsets), len({*new.names})
        sound = count and {len(column) for column in columns} == {count}
        sound = sound and all(0 <= leader < index < count for index, leader in new.ties)
        sound = sound and new.nbytes <= sum(map(new.size, {*range(count)} - {*dict(new.ties)})) + ALIGNMENT * count
        if not sound or any(offset < 0 or offset + new.size(i) > new.nbytes for i, offset in enumerate(new.offsets)):
            raise ValueError("a layout that was received is malformed")
        return new

    def size(self, index: int) -> int:
        """Return the bytes of an entry."""
        return prod(self.shapes[index]) * numpy_dtype(self.dtypes[index]).itemsize

    def array(self, index: int, flat: np.ndarray) -> np.ndarray:
        """Return an entry's array over a flat buffer ``uint8[nbytes]``; ValueError: it reaches beyond."""
        dtype = numpy_dtype(self.dtypes[index])
        strides = [stride * dtype.itemsize for stride in self.strides[index]]
        return np.ndarray(self.shapes[index], dtype, flat.data, self.offsets[index], strides)


class Weights(Mapping[str, np.ndarray]):
    """The weights of one version, by name: arrays that cannot be written, and that never change. They may be kept.

    ``dtypes`` has torch's name of each dtype: arrays of ``bfloat16`` are ``uint16`` where ``ml_dtypes`` is not
    installed. ``requires``: versions of other models, by their senders, without which this one is not installed.
    """

    def __init__(self, layout: Layout, flat: np.ndarray, version: int, sender: str, requires: dict[str, int]) -> None:
        flat.flags.writeable = False
        self.version, self.sender, self.requires = version, sender, requires
        self.dtypes = dict(zip(layout.names, layout.dtypes, strict=True))
        arrays = [layout.array(index, flat) for index in range(len(layout.names))]
        for follower, leader in layout.ties:
            arrays[follower] = arrays[leader]
        self._arrays = dict(zip(layout.names, arrays, strict=True))

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def digest(self, name: str) -> int:
        """Return the digest of a weight's dtype, shape and bytes, by which a trainer's ``verify`` compares."""
        array = self._arrays[name]
        return xxhash.xxh3_64_intdigest(f"torch.{self.dtypes[name]} {[*array.shape]}".encode() + array.tobytes())


def checksum_of(memory: np.ndarray, more: bytes) -> int:
    """Return the checksum of a flat buffer and what accompanies it; never 0."""
    digest = xxhash.xxh3_64(memory.data)
    digest.update(more)
    return digest.intdigest() or 1


def require(package: str, extra: str) -> Any:
    """Return a package that an extra installs; ModuleNotFoundError: it is missing."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{package} is missing: pip install 'wsync-rl-reader[{extra}]'") from error


def with_difference(base: np.ndarray, payload: np.ndarray) -> np.ndarray:
    """Return the version that ``payload`` (``wsync.transforms``) is away from ``base``; ValueError: it is malformed."""
    zstandard = require("zstandard", "delta")
    width, frame = int(payload[0]), payload[1:].data
    try:
        if width not in (1, 2, 4, 8) or zstandard.frame_content_size(frame) != len(base):
            raise ValueError(f"the difference is not one of {len(base)} bytes")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"the difference is malformed: {error}") from error
    changed = np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1)
    return (base.view(np.uint64) ^ changed.view(np.uint64)).view(np.uint8)
