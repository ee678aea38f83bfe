"""Safetensors files: what one begins with, and the files of a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from wsync.errors import LayoutMismatch
from wsync.weights.layout import Buffer, Layout
from wsync.weights.tensors import raw_bytes

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
FORMAT = {"format": "pt"}  # what transformers asks for
_DTYPES = {  # by their names in safetensors files
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"},
    **{torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.complex64: "C64"},
}


def files_of(layout: Layout, shard_bytes: int, stem: str = "model") -> dict[str, Sequence[int]]:
    """Return the files of a Hugging Face folder by name, with the entries in each: all of them, also tied ones.

    ``shard_bytes``: of tensors in one file. 0: the version is one file without a folder, and has tied tensors once.
    ``stem``: what their names begin with.
    """
    if not shard_bytes:
        return {"": layout.leaders}
    shards, room = list[list[int]](), 0
    for index, (_, size) in enumerate(layout.byte_ranges):
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(index)
        room -= size
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def others_of(model_folder: str | os.PathLike[str] | None) -> list[Path]:
    """Return the files of a model folder beside its weights: config, tokenizer."""
    paths = () if model_folder is None else Path(model_folder).expanduser().iterdir()
    return [path for path in paths if path.is_file() and not path.name.endswith(_WEIGHTS)]


def content_of(buffer: Buffer, shard_bytes: int, stem: str = "model") -> dict[str, Sequence[bytes | memoryview]]:
    """Return what ``files_of`` names, in pieces, with the index of a folder that has several files of tensors."""
    layout, views, files = buffer.layout, buffer.views, files_of(buffer.layout, shard_bytes, stem)
    metadata = FORMAT if shard_bytes else None
    content: dict[str, Sequence[bytes | memoryview]] = {
        file: [header_of(layout, entries, metadata), *(raw_bytes(views[index]).numpy().data for index in entries)]
        for file, entries in files.items()
    }
    return content | index_of(layout, files, stem)


def index_of(layout: Layout, files: Mapping[str, Sequence[int]], stem: str) -> dict[str, Sequence[bytes | memoryview]]:
    """Return the index of a folder, as a file of it; none, if it has one file of tensors."""
    where = {layout.names[index]: file for file, entries in files.items() for index in entries}
    index = {"metadata": {"total_size": sum(nbytes for _, nbytes in layout.byte_ranges)}, "weight_map": where}
    return {f"{stem}.safetensors.index.json": [msgspec.json.encode(index)]} if len(files) > 1 else {}


def header_of(layout: Layout, entries: Sequence[int], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return what a safetensors file of these entries begins with; LayoutMismatch: it cannot have them.

    8 bytes   length of the header, little-endian
    header    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}, and blanks
    rest      the tensors
    """
    if layout.extra:
        raise LayoutMismatch(f"extra state cannot be stored: {', '.join(sorted(layout.extra))}")
    header, begin = dict[str, Any](__metadata__=metadata) if metadata else {}, 0
    for index in entries:
        name, dtype, end = layout.names[index], layout.dtypes[index], begin + layout.byte_ranges[index][1]
        if dtype not in _DTYPES:
            raise LayoutMismatch(f"'{name}' is {dtype}, which a safetensors file cannot have")
        header[name] = {"dtype": _DTYPES[dtype], "shape": layout.shapes[index], "data_offsets": (begin, end)}
        begin = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
