"""The user's own tensors in shared memory, to which workers bind their models.

The *registered weights* are those given to ``SharedMemWeightSyncScheme`` by ``register_shared_weights``, or as its
``policy_weights``. A model is bound to them while they have the model's version; otherwise (an update was sent from
other weights, and is not copied into them yet) it is bound to a slot.

Models can be bound only to tensors in memory-mapped files (``share_memory_()``, ``memmap_()``). If one of them lies
elsewhere, models are bound to none of them. The arena's second file records their location, after the extra states::

    page   one word: the version of the registered weights
    JSON   the files' descriptors in the sender's process, and the place, dtype, shape and strides of each tensor

Every update is packed into a slot. If it was packed from the registered weights, the sender stores its version in the
word, and then publishes the update. Otherwise the sender publishes the update first, and waits until every worker has
acknowledged it: no forward uses the registered weights then. It copies the new values into them, and then stores the
word.

A worker binds its model to them again on the way into a forward, if the word names the version that the model has.
``send`` never changes them during a forward of a connected worker; the user's own writes can.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wsync.control.liveness import EXHAUSTED
from wsync.loops.tensors import copy_all
from wsync.shm.arena import EXTRA_END, SenderArena, WorkerArena
from wsync.shm.memory import allocate, write_at
from wsync.weights.clean_thread import in_clean_thread
from wsync.weights.layout import Layout

_JSON_AT = EXTRA_END + mmap.PAGESIZE  # bytes from the beginning of the file


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A stretch of this process's memory that belongs to a file; ``file`` is the file's device and inode."""

    begin: int
    end: int
    offset: int
    file: tuple[int, int]
    path: str


def _shared_mappings() -> list[_Mapping]:
    found: list[_Mapping] = []
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")[:-1]:  # splitlines() may split a path
        addresses, permissions, offset, device, inode, *path = line.split(maxsplit=5)
        if permissions.endswith("s") and inode != "0":
            begin, end = (int(address, 16) for address in addresses.split("-"))
            major, minor = (int(part, 16) for part in device.split(":"))
            file = os.makedev(major, minor), int(inode)
            found.append(_Mapping(begin, end, int(offset, 16), file, "".join(path)))
    return found


def _open(mapping: _Mapping) -> int | None:
    """Return a new descriptor of a mapped file; None if the file has neither a path nor an open descriptor here."""
    paths = [mapping.path, *(f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))]
    for path in paths:
        try:
            state = os.stat(path)
            if (state.st_dev, state.st_ino) == mapping.file:
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            continue  # closed meanwhile, or without a name
    return None


class RegisteredWeights:
    """The sender's end. Made by ``init_on_sender``; then called under the sender's lock, except ``close``.

    Args:
        arena: the arena of the sender.
        tensors: the registered tensors, by name.
        close_files: closes the descriptors of the files with these tensors, which ``create`` has opened. Called by
            ``close``, or when this object is no longer used.
    """

    def __init__(self, arena: SenderArena, tensors: Mapping[str, Tensor], close_files: Callable[[], None]) -> None:
        self._arena = arena
        self._tensors = dict(tensors)
        self._close_files = weakref.finalize(self, close_files)
        allocate(arena.fds[1], EXTRA_END, mmap.PAGESIZE)
        self._word = memoryview(mmap.mmap(arena.fds[1], mmap.PAGESIZE, offset=EXTRA_END)).cast("q")

    @classmethod
    def create(cls, arena: SenderArena, tensors: Mapping[str, Tensor]) -> RegisteredWeights | None:
        """Write into ``arena`` where ``tensors`` lie, for its workers, and return the sender's end.

        Returns:
            None if not all tensors lie in shared memory files.

        Raises:
            WeightSyncError: the machine has no memory left for the description.
        """
        with ExitStack() as opened:
            described = cls._described(tensors, opened)
            if described is None:
                return None
            registered = cls(arena, tensors, opened.pop_all().close)
            write_at(arena.fds[1], json.dumps(described).encode(), _JSON_AT)
            return registered

    @staticmethod
    def _described(tensors: Mapping[str, Tensor], opened: ExitStack) -> dict[str, Any] | None:
        """Return what ``create`` writes, or None. Opens the files of the tensors; ``opened`` closes them."""
        mappings = _shared_mappings() if all(tensor.is_cpu for tensor in tensors.values()) else []
        files: dict[tuple[int, int], int] = {}  # descriptors
        places: dict[str, Any] = {}
        for name, tensor in tensors.items():
            if not tensor.numel():
                continue
            address = tensor.data_ptr()
            mapping = next((one for one in mappings if one.begin <= address < one.end), None)
            fd = None if mapping is None else files.get(mapping.file)
            if mapping is not None and fd is None and (fd := _open(mapping)) is not None:
                opened.callback(os.close, fd)
            if mapping is None or fd is None:
                return None
            files[mapping.file] = fd
            offset = mapping.offset + address - mapping.begin
            dtype = str(tensor.dtype).removeprefix("torch.")
            places[name] = [list(mapping.file), offset, dtype, list(tensor.shape), list(tensor.stride())]
        known = [[list(file), fd] for file, fd in files.items()]
        return {"pid": os.getpid(), "files": known, "tensors": places}

    def matches(self, layout: Layout, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors``, in the order of ``layout``, are the registered ones."""
        own = [self._tensors.get(name) for name in layout.names]
        return all(
            not tensor.numel()
            or (one is not None and one.data_ptr() == tensor.data_ptr() and one.stride() == tensor.stride())
            for one, tensor in zip(own, tensors, strict=True)
        )

    def set_version(self, version: int) -> None:
        """Record that the registered weights have ``version``: workers may bind their models to them."""
        self._word[0] = version

    def copy_published(self, version: int) -> bool:
        """Copy the published weights into the registered ones, and return True.

        Return False, with nothing copied, unless exactly one slot is published: workers may have been sent different
        weights. Called when every worker has acknowledged ``version``, so no forward of a connected worker uses the
        registered weights.
        """
        slots, names = self._arena.published_slots(), self._arena.layout.names
        if len(slots) != 1:
            return False
        pairs = [
            (self._tensors[name], view)
            for name, view in zip(names, self._arena.views(slots[0]), strict=True)
            if name in self._tensors
        ]
        # 0 while they are written: a disconnected worker that copies them meanwhile reads this word afterwards, and so
        # finds out that its copy is invalid.
        self.set_version(0)
        copy_all([own for own, _ in pairs], [view for _, view in pairs])
        self.set_version(version)
        return True

    def close(self) -> None:
        """Close this end's descriptors. Idempotent."""
        self._close_files()


class RegisteredView:
    """A worker's end. Made by the thread in ``connect``; afterwards read inside the gate.

    Args:
        word: the mapped page.
        tensors: the registered weights, mapped here, by name.
    """

    def __init__(self, word: memoryview, tensors: Mapping[str, Tensor]) -> None:
        self._word = word
        self.tensors = tensors

    @property
    def version(self) -> int:
        """The registered weights' version; 0 before the first, and while the sender writes them."""
        return self._word[0]

    @classmethod
    def of(cls, arena: WorkerArena) -> RegisteredView | None:
        """Return the sender's registered weights; None if there are none, or they cannot be opened here.

        Raises:
            OSError: there is no descriptor or memory left.
        """
        size = os.fstat(arena.fds[1]).st_size
        if size <= _JSON_AT:
            return None
        handle = json.loads(os.pread(arena.fds[1], size - _JSON_AT, _JSON_AT))
        try:
            files = {tuple(file): _map(handle["pid"], fd, file) for file, fd in handle["files"]}
        except OSError as error:  # the sender's process is not visible (another container or user), or has closed it
            if error.errno in EXHAUSTED:
                raise
            return None
        word = memoryview(mmap.mmap(arena.fds[1], mmap.PAGESIZE, offset=EXTRA_END)).cast("q")
        return cls(word, in_clean_thread(_views, files, handle["tensors"]))


def _map(pid: int, fd: int, file: Sequence[int]) -> mmap.mmap:
    descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if [state.st_dev, state.st_ino] != list(file):
            raise FileNotFoundError("another file has this descriptor by now")
        return mmap.mmap(descriptor, state.st_size)
    finally:
        os.close(descriptor)


def _views(files: Mapping[tuple[int, ...], mmap.mmap], places: Mapping[str, Any]) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    for name, (file, offset, dtype, shape, strides) in places.items():
        kind = getattr(torch, dtype)
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        flat = torch.frombuffer(files[tuple(file)], dtype=kind, count=count, offset=offset)
        views[name] = flat.as_strided(shape, strides)
    return views
