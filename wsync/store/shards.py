"""A version of a model of which each rank has shards: every rank writes some of its files, rank 0 the manifest.

Tensors are gathered one by one, in the order of the files. A rank keeps one file at a time; all write theirs side by
side. Rank 0 digests every tensor, so that a version is as if one process had written it. After each step all ranks tell
their errors, and all raise. After an error in a collective call nothing is told: it would be taken for a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import xxhash
from msgspec.structs import replace
from torch import Tensor
from torch import distributed as dist

from wsync.errors import WeightSyncError
from wsync.store.files import UNFINISHED, Manifest, Stored
from wsync.store.safetensors_file import FORMAT, files_of, header_of, index_of
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot
from wsync.weights.tensors import describe, is_sharded, raw_bytes, require_carried


def publish_shards(files: Any, read: Callable[[], Snapshot], version: int, group: Any) -> Stored:
    """Publish what ``read`` returns in each rank of ``group`` as one version; return what is stored of it.

    Rank 0's ``files`` (``Files``) and ``version`` count. Errors: as of ``StoreWeightSyncScheme.send_shards``.
    """
    store, rank, count = files.store, dist.get_rank(group), dist.get_world_size(group)
    tensors = dict[str, Tensor]()

    def plan() -> Manifest:
        if not rank:
            store.delete_before(0)  # what an error has left unfinished
        given = read()
        tensors.update(given.tensors)
        layout = _layout_of(given)
        header_of(layout, layout.leaders)  # refused here if a file cannot have it
        size, stored = min(files.shard_bytes, -(-layout.nbytes // count)), Stored(version, "", layout.nbytes, 0)
        return Manifest(files.name, layout.encode(), (stored,), shard_bytes=size)

    plans = _together(group, plan)
    manifest, layouts = plans[0], [Layout.decode(own.layout) for own in plans]
    layout, forms = layouts[0], [{*zip(one.names, one.shapes, one.dtypes, strict=True)} for one in layouts]
    for other, form in enumerate(forms):
        if odd := [f"'{name}'" for name, *_ in forms[0] ^ form]:
            raise WeightSyncError(f"nothing was published: ranks 0 and {other} differ in {describe(sorted(odd))}")
    name = manifest.name(manifest.version, whole=True)
    folder = name if store.local is None else name + UNFINISHED  # an object store cannot rename it
    shares, digest, end = [*files_of(layout, manifest.shard_bytes).items()], xxhash.xxh3_64(), 0
    for first in range(0, len(shares), count):
        content, at, write = torch.empty(0, dtype=torch.uint8), 0, None
        for owner, (file, entries) in enumerate(shares[first : first + count]):
            if owner == rank:  # one piece of memory: many, between others that are freed, would leave gaps
                content = torch.empty(sum(layout.byte_ranges[index][1] for index in entries), dtype=torch.uint8)
                head, path = header_of(layout, entries, FORMAT), f"{folder}/{file}"
                write = partial(store.write, path, {"": [head, content.numpy().data]})
            for index in entries:
                whole = raw_bytes(_whole(tensors[layout.names[index]], group))
                if owner == rank:
                    content[at : (at := at + len(whole))] = whole
                if not rank and layout.offsets[index] >= end:  # not tied to an earlier one
                    digest.update(bytes(layout.offsets[index] - end))
                    digest.update(whole.numpy(force=True).data)
                    end = sum(layout.byte_ranges[index])
                del whole  # before the next one is gathered
        _together(group, write)

    def commit() -> Stored:
        digest.update(bytes(layout.nbytes - end) + manifest.layout)
        stored = replace(manifest.versions[0], checksum=f"{digest.intdigest() or 1:016x}")
        for file, content in (index_of(layout, dict(shares), "model") | files.others).items():
            store.write(f"{folder}/{file}", {"": content})
        if store.local is not None:
            (store.local / folder).rename(store.local / name)
        files.name_newest(replace(manifest, versions=(stored,)))
        return stored

    return _together(group, None if rank else commit)[0]


def _together(group: Any, call: Callable[[], Any] | None) -> list[Any]:
    """Have each rank make its call, if it has one; return what all returned. WeightSyncError, in all: one raised."""
    own, text, cause = None, "", None
    try:
        own = call and call()
    except Exception as error:  # noqa: BLE001  it is raised below
        text, cause = f"{type(error).__name__}: {error}", error
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (own, text), group=group)
    if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]:
        raise WeightSyncError(f"nothing was published: {describe(failed)}") from cause
    return [one for one, _ in answers]


def _layout_of(given: Snapshot) -> Layout:
    """Return the layout of the whole tensors, by stand-ins of one number each. Of rank 0: others may lack a shard."""
    stand_ins, made = dict[str, Any](given.tensors), dict[Any, Tensor]()
    own = {name: one.to_local() if is_sharded(one) else one for name, one in stand_ins.items()}
    require_carried([*own], [*own.values()])
    for name, local in own.items():
        shape = given.tensors[name].shape
        tied = (local.data_ptr(), local.stride(), shape, local.dtype) if local.numel() else name
        stand_ins[name] = made.setdefault(tied, torch.empty((), dtype=local.dtype).expand(shape))
    return Layout.of(given._replace(tensors=stand_ins))


def _whole(tensor: Any, group: Any) -> Tensor:
    """Return a tensor of which each rank has a shard, or one as rank 0 has it: those of BatchNorm may differ."""
    if is_sharded(tensor):
        return tensor.detach().full_tensor()
    whole = tensor.detach().contiguous()
    whole = torch.empty_like(whole) if dist.get_rank(group) else whole
    if whole.numel():
        dist.broadcast(raw_bytes(whole), group=group, group_src=0)
    return whole
