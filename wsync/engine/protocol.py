"""What a trainer and an engine exchange over HTTP: routes, JSON fields, and bodies with weights.

Routes, fields and modes are those of vLLM 0.32: "Weight Transfer" (docs.vllm.ai/en/v0.32.0/training/weight_transfer/)
and "Async Reinforcement Learning" (docs.vllm.ai/en/v0.32.0/training/async_rl/). There the weights themselves travel by
NCCL or CUDA IPC. The *body transfer* is an addition of this library: the body of ``/update_weights`` is the packed
weights, and ``/start_weight_update`` has fields.

=====================================  ===============================================================================
request                                fields of the body transfer: of JSON; of *update*, in its query
=====================================  ===============================================================================
``POST /init_weight_transfer_engine``  ``init_info``: ``transfer`` ("body"), ``session``, ``layout``
``POST /start_weight_update``          ``session``
``POST /update_weights``               ``session``, ``checksum`` (of all bytes, hexadecimal)
``POST /finish_weight_update``         ``session``, ``weight_version``
``POST /verify_weights``               ``session``, ``digests`` (``digest_of`` each tensor, by name)
``POST /pause?mode=…``, ``/resume``    none
=====================================  ===============================================================================

``session`` is a random name that the trainer chooses for an initialisation. ``layout`` is ``Layout.encode`` in base64:
it says where each tensor lies in the packed weights. Every answer is a JSON object. That of *finish* has the
``weight_version`` that the engine now has, and the seconds that this took: ``wait_seconds`` for the gate,
``apply_seconds``.

SGLang has other routes, here those of 0.5.23: ``sglang/srt/entrypoints/http_server.py``, with the fields in
``sglang/srt/managers/io_struct.py``. Its ``/health`` generates a token, which a pause would stop: ``/model_info`` is
asked instead. If a scheduler dies, the server ends as well.
"""

from __future__ import annotations

from typing import Literal, get_args

INIT = "/init_weight_transfer_engine"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
VERIFY = "/verify_weights"
PAUSE = "/pause"
RESUME = "/resume"
WORLD_SIZE = "/get_world_size"
HEALTH = "/health"
MODEL_INFO = "/model_info"
MODELS = "/v1/models"
READ_ONLY = (WORLD_SIZE, HEALTH, MODEL_INFO, MODELS)  # by GET
ALIVE = {"vllm": (WORLD_SIZE, HEALTH), "sglang": (MODEL_INFO, MODEL_INFO)}  # answered once it serves; while it lives

TRANSFER = "body"

PauseMode = Literal["abort", "wait", "keep"]
"""What happens to generations in flight. abort: end them. wait: let them finish. keep: suspend them, and continue them
with the new weights. ``engine_app`` has no such routes."""
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)

EngineKind = Literal["vllm", "sglang"]
"""Whose routes a server has; those of ``engine_app`` are vLLM's."""


def pause_and_resume(kind: EngineKind, mode: PauseMode, clear_cache: bool) -> list[tuple[str, dict[str, str] | None]]:
    """Return the requests by which generation is suspended, and goes on: routes and fields."""
    if kind == "sglang":  # it clears its caches while it loads, if no request holds a part of them
        its_mode = {"abort": "abort"}.get(mode, "retract" if clear_cache else "in_place")
        return [("/pause_generation", {"mode": its_mode}), ("/continue_generation", {})]
    return [(f"{PAUSE}?mode={mode}&clear_cache={str(clear_cache).lower()}", None), (RESUME, None)]


def require_valid_token(token: str | None) -> None:
    """Raise ``ValueError`` unless ``token`` can be a bearer token, or is None."""
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise ValueError("a token has printable ASCII characters, at least one; None is for no token")
