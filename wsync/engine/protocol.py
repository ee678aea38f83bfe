"""What a trainer and an engine exchange over HTTP: routes, JSON fields, and bodies with weights.

Routes, fields and modes are those of vLLM 0.32: "Weight Transfer" (docs.vllm.ai/en/v0.32.0/training/weight_transfer/)
and "Async Reinforcement Learning" (docs.vllm.ai/en/v0.32.0/training/async_rl/), in its source
``vllm/entrypoints/rl/online/api_router.py``. There the weights themselves travel by NCCL or CUDA IPC. The *body
transfer* is an addition of this library: the body of ``/update_weights`` is a safetensors file with some of the
version's tensors, and ``/start_weight_update`` has fields. vLLM does not have it.

=====================================  =================================================================================
request                                JSON fields of the body transfer
=====================================  =================================================================================
``POST /init_weight_transfer_engine``  ``init_info``: ``transfer`` ("body"), ``session``, ``layout``, ``chunk_bytes``,
                                       ``delta``
``POST /start_weight_update``          ``session``, ``weight_version``; perhaps ``base``
``POST /update_weights``               none: a safetensors file, with ``session`` and ``weight_version`` as its metadata
``POST /finish_weight_update``         ``session``, ``weight_version``, ``checksum`` (of the flat buffer, hexadecimal)
``POST /pause?mode=…``, ``/resume``    none
=====================================  =================================================================================

With ``Delta`` (``delta`` is true) a version may come as differences to one that the engine has, which ``base`` names: a
body is then either tensors as above, or the difference of some of them (``wsync/transforms/delta.py``), a tensor named
``difference`` with ``base``, ``begin`` and ``end`` in the metadata: the range of bytes of the flat buffer. An engine
that does not have the base answers ``/start_weight_update`` with the reason ``no_base``, and is sent the full version.

``session`` is a random name that the trainer chooses for an initialisation; ``layout`` is JSON (``SenderSettings``).
``weight_version`` and ``GET /weight_info`` are as on vLLM's main branch (docs/training/weight_transfer/README.md at
commit 0318007); servers that do not have them ignore the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from wsync.weights.layout import Layout
from wsync.weights.tensor_file import LENGTH_BYTES, Entry, header_entry, packed_header, parse_header

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
"""``reason`` in the answer of an engine that has no layout: it has been started again."""
NO_BASE = "no_base"
"""``reason`` in the answer of an engine that does not have the version to which differences would be."""
DIFFERENCE = "difference"
"""Name of the tensor in a body with a difference."""

PauseMode = Literal["abort", "wait", "keep"]
"""What happens to generations in flight. abort: end them. wait: let them finish. keep: suspend them, and continue them
with the new weights."""
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)

HEADER_BYTES = 1 << 20
"""The largest size of what a body has besides its tensors' bytes."""
_METADATA_BYTES = 1 << 10  # the most that a header has besides its tensors


def require_valid_token(token: str | None) -> None:
    """Raise ``ValueError`` unless ``token`` can be a bearer token, or is None."""
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise ValueError("a token has printable ASCII characters, at least one; None is for no token")


def groups_of(layout: Layout, chunk_bytes: int) -> Iterator[list[int]]:
    """Return the entries of ``layout`` that travel in each body: at most ``chunk_bytes`` bytes, or one tensor.

    The header of a body has at most ``HEADER_BYTES``. Tied entries travel once.
    """
    group, size, header = list[int](), 0, 0
    for index in layout.leaders:
        nbytes = layout.byte_ranges[index][1]
        entry = len(json.dumps(header_entry(layout, index, chunk_bytes)))
        if group and (size + nbytes > chunk_bytes or header + entry > HEADER_BYTES - _METADATA_BYTES):
            yield group
            group, size, header = [], 0, 0
        group.append(index)
        size += nbytes
        header += entry
    yield group


def body_limit(layout: Layout, chunk_bytes: int) -> int:
    """Return the largest size of a body, in bytes."""
    return max(min(chunk_bytes, layout.nbytes), *(nbytes for _, nbytes in layout.byte_ranges)) + HEADER_BYTES


def make_difference_body(difference: bytes, metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """Return the difference of some tensors as a safetensors file, in pieces.

    Args:
        difference: see ``wsync.transforms.delta``.
        metadata: ``session``, ``weight_version``, ``base``, ``begin`` and ``end``.
    """
    entry = {"dtype": "U8", "shape": [len(difference)], "data_offsets": [0, len(difference)]}
    return [packed_header({"__metadata__": dict(metadata), DIFFERENCE: entry}), difference]


def parse_body(body: memoryview) -> tuple[Mapping[str, Entry], Mapping[str, str], memoryview]:
    """Return the tensors that a safetensors file has, in the order of their bytes, its metadata, and their bytes.

    Raises:
        ValueError: it is malformed; says why.
    """
    length = int.from_bytes(body[:LENGTH_BYTES], "little")
    start = LENGTH_BYTES + length
    if len(body) < start:
        raise ValueError("the body is not a safetensors file: it ends within its header")
    try:
        entries, metadata = parse_header(bytes(body[LENGTH_BYTES:start]), len(body) - start)
    except ValueError as error:
        raise ValueError(f"the body is malformed: {error}") from error
    return entries, metadata, body[start:]


def as_tensor(content: memoryview) -> Tensor:
    """Return the bytes of a body as ``uint8[n]``, without a copy."""
    return torch.frombuffer(content, dtype=torch.uint8) if len(content) else torch.empty(0, dtype=torch.uint8)
