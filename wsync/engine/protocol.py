"""What a trainer and an engine exchange over HTTP: routes, JSON fields, and bodies with weights.

Routes, fields and modes are those of vLLM 0.32: "Weight Transfer" (docs.vllm.ai/en/v0.32.0/training/weight_transfer/)
and "Async Reinforcement Learning" (docs.vllm.ai/en/v0.32.0/training/async_rl/), in its source
``vllm/entrypoints/rl/online/api_router.py``. There the weights themselves travel by NCCL or CUDA IPC. The *body
transfer* is an addition of this library: the body of ``/update_weights`` is a safetensors file with some of the
version's tensors, and ``/start_weight_update`` has fields. vLLM does not have it.

=====================================  =================================================================================
request                                JSON fields of the body transfer
=====================================  =================================================================================
``POST /init_weight_transfer_engine``  ``init_info``: ``transfer`` ("body"), ``session``, ``layout``, ``chunk_bytes``
``POST /start_weight_update``          ``session``, ``weight_version``
``POST /update_weights``               none: a safetensors file, with ``session`` and ``weight_version`` as its metadata
``POST /finish_weight_update``         ``session``, ``weight_version``, ``checksum`` (of the flat buffer, hexadecimal)
``POST /pause?mode=…``, ``/resume``    none
=====================================  =================================================================================

``session`` is a random name that the trainer chooses for an initialisation; ``layout`` is JSON (``SenderSettings``).
``weight_version`` and ``GET /weight_info`` are as on vLLM's main branch (docs/training/weight_transfer/README.md at
commit 0318007); servers that do not have them ignore the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.weights.layout import Layout

INIT = "/init_weight_transfer_engine"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
WEIGHT_INFO = "/weight_info"
WORLD_SIZE = "/get_world_size"
HEALTH = "/health"

JSON = "application/json"
SAFETENSORS = "application/x-safetensors"
TRANSFER = "body"
NOT_INITIALISED = "not_initialised"
"""``reason`` in the answer of an engine that knows no layout: it has been started again."""

PauseMode = Literal["abort", "wait", "keep"]
"""What happens to generations in flight. abort: end them. wait: let them finish. keep: suspend them, and continue them
with the new weights."""
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)

HEADER_BYTES = 1 << 20
"""The largest size of what a body has besides its tensors' bytes."""
_LENGTH = 8  # a safetensors file begins with the length of its header
_SMALL = 64 << 10  # smaller tensors are copied together, to be sent by one call
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""Names of dtypes in safetensors files."""


def require_valid_token(token: str | None) -> None:
    """Raise ``ValueError`` unless ``token`` can be a bearer token, or is None."""
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise ValueError("a token has printable ASCII characters, at least one; None is for no token")


def groups_of(layout: Layout, chunk_bytes: int) -> Iterator[list[int]]:
    """Return the entries of ``layout`` that travel in each body: at most ``chunk_bytes`` bytes, or one tensor.

    Tied entries travel once.
    """
    group, size, places = list[int](), 0, layout.places
    for index in layout.leaders:
        nbytes = places[index][1]
        if group and size + nbytes > chunk_bytes:
            yield group
            group, size = [], 0
        group.append(index)
        size += nbytes
    yield group


def body_limit(layout: Layout, chunk_bytes: int) -> int:
    """Return the largest size of a body, in bytes."""
    return max(min(chunk_bytes, layout.nbytes), *(nbytes for _, nbytes in layout.places)) + HEADER_BYTES


class Entry(NamedTuple):
    """A tensor in a body: what its header has, and where its bytes are."""

    dtype: str
    shape: Sequence[int]
    begin: int
    end: int


def check_dtypes(layout: Layout) -> None:
    """Raise ``LayoutMismatch`` if safetensors files cannot have one of the tensors."""
    for name, dtype in zip(layout.names, layout.dtypes, strict=True):
        if dtype not in _DTYPES:
            raise LayoutMismatch(f"'{name}' is {dtype}, which a safetensors file cannot have")


def make_body(
    layout: Layout, views: Sequence[Tensor], group: Sequence[int], session: str, version: str
) -> list[bytes | memoryview]:
    """Return some tensors of a version as a safetensors file, in pieces; the larger ones are not copied.

    Args:
        layout: of the version.
        views: its packed tensors.
        group: which of them.
        session: see the module.
        version: its name.
    """
    header: dict[str, Any] = {"__metadata__": {"session": session, "weight_version": version}}
    at = 0
    for index in group:
        end = at + layout.places[index][1]
        dtype, shape = _DTYPES[layout.dtypes[index]], list(layout.shapes[index])
        header[layout.names[index]] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    pieces: list[bytes | memoryview] = []
    small = bytearray(len(text).to_bytes(_LENGTH, "little") + text)
    for index in group:
        content = _bytes_of(views[index])
        if len(content) > _SMALL:
            pieces += [bytes(small), content]
            small.clear()
        else:
            small += content
    return [piece for piece in (*pieces, bytes(small)) if piece]


def _bytes_of(view: Tensor) -> memoryview:
    if not view.numel():
        return memoryview(b"")
    return view.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def parse_body(body: memoryview) -> tuple[Mapping[str, Entry], Mapping[str, str]]:
    """Return the tensors that a safetensors file has, in the order of their bytes, and its metadata.

    Raises:
        ValueError: it is malformed; says why.
    """
    length = int.from_bytes(body[:_LENGTH], "little")
    if len(body) < _LENGTH or length > len(body) - _LENGTH:
        raise ValueError("the body is not a safetensors file: it ends within its header")
    start = _LENGTH + length
    try:
        header = json.loads(bytes(body[_LENGTH:start]))
        metadata = header.pop("__metadata__", {})
        entries = {
            name: Entry(fields["dtype"], fields["shape"], *(start + at for at in fields["data_offsets"]))
            for name, fields in header.items()
        }
        ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"the body is not a safetensors file: {type(error).__name__}: {error}") from error
    at = start
    for name, entry in ordered:
        if type(entry.begin) is not int or type(entry.end) is not int or not at == entry.begin <= entry.end:
            raise ValueError(f"the body is not a safetensors file: '{name}' has wrong offsets")
        at = entry.end
    if at != len(body):
        raise ValueError(f"the body has {len(body)} bytes, and its tensors end at {at}")
    if not isinstance(metadata, dict):
        raise ValueError("the metadata of the body is no JSON object")
    return dict(ordered), metadata


def find_misfit(entries: Mapping[str, Entry], layout: Layout, indices: Mapping[str, int]) -> str:
    """Return what is wrong with received tensors: an unknown name, another shape or dtype; empty if nothing is.

    Args:
        entries: of a body.
        layout: of the version.
        indices: which entries of the layout may travel, by name.
    """
    for name, entry in entries.items():
        index = indices.get(name)
        if index is None:
            return f"'{name}' is not in the layout, or is tied to another tensor, which travels instead"
        dtype, shape = _DTYPES[layout.dtypes[index]], list(layout.shapes[index])
        if entry.dtype != dtype or entry.shape != shape or entry.end - entry.begin != layout.places[index][1]:
            return f"'{name}' is {entry.dtype}{entry.shape}, not {dtype}{shape}"
    return ""
