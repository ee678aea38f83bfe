"""A version of a model of which each rank has shards: every rank writes some of its files, rank 0 the manifest.

    all      plan: names, shapes, dtypes ─→ alike? ─→ each tensor, gathered: its owner keeps it, rank 0 digests it
    owner    writes a file of what it has kept, beside the other owners ─→ all: has every file been written?
    rank 0   writes index and config, renames the folder, writes the manifest ─→ all: the version, or the error

The files and the digest are those that one process would have written with the same ``shard_bytes``: readers do not see
a difference. A rank has its part of as many files as there are ranks, and the tensor that is being gathered.

An error in one rank is told to all at the arrows, and raised in all. After an error in a collective call nothing is
told: the others would take it for a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import xxhash
from torch import Tensor
from torch import distributed as dist

from wsync.errors import WeightSyncError
from wsync.store.files import Files, Manifest, Stored, folder_of
from wsync.store.safetensors_file import FORMAT, files_of, header_of, index_of
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot
from wsync.weights.tensors import describe, is_sharded, raw_bytes, require_carried

P = ParamSpec("P")
T = TypeVar("T")


def publish_shards(files: Files, read: Callable[[], Snapshot], version: int, group: Any) -> Stored:
    """Publish what ``read`` returns in each rank of ``group`` as one version; return what is stored of it.

    ``files`` and ``version``: those of rank 0 count. WeightSyncError: names the ranks that could not read or write, or
    have other weights; or the group's error is its cause: a rank has died, or has not called in time.
    """
    store, rank, count = files.store, dist.get_rank(group), dist.get_world_size(group)

    def plan() -> tuple[Mapping[str, Tensor], bytes]:
        given = read()
        layout = _layout_of(given)
        header_of(layout, layout.leaders)  # refused here if a file cannot have it
        return given.tensors, layout.encode()

    planned, error = _tried(plan)
    told = _told((planned and planned[1], version, files.name, files.shard_bytes), error, group)
    encoded, version, writer, shard_bytes = told[0]
    layout = Layout.decode(encoded)
    _require_alike(layout, [Layout.decode(own) for own, *_ in told])
    assert planned is not None, "an error was told"
    tensors, name = planned[0], folder_of(version, writer)
    shard_bytes = min(shard_bytes, -(-layout.nbytes // count))
    shares, digest, end, error = [*files_of(layout, shard_bytes).items()], xxhash.xxh3_64(), 0, None
    for first in range(0, len(shares), count):
        kept, at = torch.empty(0, dtype=torch.uint8), 0
        for owner, (_, entries) in enumerate(shares[first : first + count]):
            if owner == rank:  # one piece of memory: many, between others that are freed, would leave gaps
                kept = torch.empty(sum(layout.byte_ranges[index][1] for index in entries), dtype=torch.uint8)
            for index in entries:
                whole = raw_bytes(_whole(tensors[layout.names[index]], group))
                if owner == rank:
                    kept[at : (at := at + len(whole))] = whole
                if not rank and layout.offsets[index] >= end:  # not tied to an earlier one
                    digest.update(bytes(layout.offsets[index] - end))
                    digest.update(whole.numpy(force=True).data)
                    end = sum(layout.byte_ranges[index])
                del whole  # before the next one is gathered
        if first + rank < len(shares) and error is None:
            file, entries = shares[first + rank]
            content = [header_of(layout, entries, FORMAT), kept.numpy().data]
            _, error = _tried(store.write, f"{store.unfinished(name)}/{file}", {"": content})
            del content

    def commit() -> Stored:
        digest.update(bytes(layout.nbytes - end) + encoded)
        stored = Stored(version, f"{digest.intdigest() or 1:016x}", layout.nbytes, 0)
        for file, content in (index_of(layout, dict(shares)) | files.others).items():
            store.write(f"{store.unfinished(name)}/{file}", {"": content})
        store.finish(name)
        files.name_newest(Manifest(writer, encoded, (stored,), shard_bytes=shard_bytes))
        return stored

    try:
        _told(None, error, group)
        stored, error = (None, None) if rank else _tried(commit)
        return _told(stored, error, group)[0]
    except WeightSyncError:
        if not rank:
            store.delete_before(0)  # what is unfinished
        raise


def _tried(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T | None, Exception | None]:
    """Call a function; return its result, or its error for ``_told``."""
    try:
        return call(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001  it is raised in all ranks
        return None, error


@contextmanager
def _with_all(group: Any) -> Iterator[None]:
    """Raise the group's error, in a collective call, as a ``WeightSyncError``."""
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(
            f"rank {dist.get_rank(group)}: the ranks cannot go on together; has one died, or not called send_shards() "
            f"within the group's timeout? End this process, as the group may be out of step: {error}"
        ) from error


def _told(own: Any, error: Exception | None, group: Any) -> list[Any]:
    """Tell all ranks something; return what each has told. WeightSyncError, in all: some have told an error."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    text = "" if error is None else f"{type(error).__name__}: {error}"
    with _with_all(group):
        dist.all_gather_object(answers, (own, text), group=group)
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
    if failed:
        raise WeightSyncError(f"this version was not published: {describe(failed)}") from error
    return [told for told, _ in answers]


def _require_alike(layout: Layout, others: Sequence[Layout]) -> None:
    """Raise ``WeightSyncError`` if ranks would gather different tensors, of which PyTorch makes anything."""
    expected = {*zip(layout.names, layout.shapes, layout.dtypes, strict=True)}
    for rank, other in enumerate(others):
        odd = expected ^ {*zip(other.names, other.shapes, other.dtypes, strict=True)}
        if odd:
            names = describe(sorted({f"'{name}'" for name, *_ in odd}))
            raise WeightSyncError(f"this version was not published: ranks 0 and {rank} differ in {names}")


def _layout_of(given: Snapshot) -> Layout:
    """Return the layout of the whole tensors, by stand-ins of one number each. Of rank 0: others may lack a shard."""
    tensors = dict[str, Any](given.tensors)
    own = {name: one.to_local() if is_sharded(one) else one for name, one in tensors.items()}
    require_carried([*own], [*own.values()])
    made, stand_ins = dict[Any, Tensor](), dict[str, Tensor]()
    for name, one in tensors.items():
        local = own[name]
        key = (local.data_ptr(), local.stride(), one.shape, one.dtype) if local.numel() else name
        stand_ins[name] = made.setdefault(key, torch.empty((), dtype=one.dtype).expand(one.shape))
    return Layout.of(given._replace(tensors=stand_ins))


def _whole(tensor: Any, group: Any) -> Tensor:
    """Return a tensor of which each rank has a shard, or one as rank 0 has it: those of BatchNorm may differ."""
    with torch.no_grad(), _with_all(group):
        if is_sharded(tensor):
            return tensor.full_tensor().contiguous()
        whole = tensor.detach().contiguous()
        if dist.get_rank(group):
            whole = torch.empty_like(whole)
        if whole.numel():
            dist.broadcast(raw_bytes(whole), group=group, group_src=0)
        return whole
