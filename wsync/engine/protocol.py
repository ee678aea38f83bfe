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
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
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
"""What happens to generations in flight: they end at once; the pause waits for their end; or they stop and go on."""
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)

HEADER_BYTES = 1 << 20
"""Room for what a body has besides its tensors' bytes."""
_LENGTH = 8  # a safetensors file begins with the length of its header


def groups_of(layout: Layout, chunk_bytes: int) -> Iterator[list[int]]:
    """Return the entries of ``layout`` that travel in each body: at most ``chunk_bytes`` bytes, or one tensor.

    Tied entries travel once.
    """
    followers = {follower for follower, _ in layout.ties}
    group, size = list[int](), 0
    for index, (_, nbytes) in enumerate(layout.places):
        if index in followers:
            continue
        if group and size + nbytes > chunk_bytes:
            yield group
            group, size = [], 0
        group.append(index)
        size += nbytes
    yield group


def body_limit(layout: Layout, chunk_bytes: int) -> int:
    """Return the largest size of a body, in bytes."""
    return max(chunk_bytes, *(nbytes for _, nbytes in layout.places)) + HEADER_BYTES


def make_body(tensors: Mapping[str, Tensor], session: str, version: str) -> bytes:
    """Return some tensors of a version as a safetensors file.

    Raises:
        LayoutMismatch: safetensors does not have one of their dtypes.
    """
    try:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return save(plain, {"session": session, "weight_version": version})
    except (KeyError, SafetensorError) as error:
        raise LayoutMismatch(f"a body of HTTP cannot have these weights: {error}") from error


def parse_body(body: bytes) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Return the tensors of a safetensors file, and its metadata.

    Raises:
        ValueError: it is malformed; says why.
    """
    try:
        with torch.inference_mode(False):
            tensors = load(body)
        length = int.from_bytes(body[:_LENGTH], "little")
        metadata = json.loads(body[_LENGTH : _LENGTH + length]).get("__metadata__", {})
    except (SafetensorError, KeyError, ValueError, RuntimeError, RecursionError) as error:
        raise ValueError(f"the body is not a safetensors file: {error}") from error
    return tensors, metadata


def first_that_differs(tensors: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> str:
    """Return what is wrong with received tensors: an unknown name, another shape or dtype; empty if nothing is."""
    for name, tensor in tensors.items():
        view = views.get(name)
        if view is None:
            return f"'{name}' is not in the layout, or is tied to another tensor, which travels instead"
        if tensor.shape != view.shape or tensor.dtype != view.dtype:
            return f"'{name}' is {tensor.dtype}{list(tensor.shape)}, not {view.dtype}{list(view.shape)}"
    return ""


def in_order(views: Sequence[Tensor], layout: Layout, indices: Sequence[int]) -> dict[str, Tensor]:
    """Return the views of some entries, by name."""
    return {layout.names[index]: views[index] for index in indices}
