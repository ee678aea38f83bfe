"""The application by which a trainer updates the engine in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from torch import nn

from wsync.engine.protocol import require_valid_token
from wsync.errors import missing_extra
from wsync.gate import gate_model
from wsync.transforms import Transform, compose
from wsync.weights.targets import Destination, Load

if TYPE_CHECKING:
    from wsync.engine.server import EngineApp


def engine_app(
    model: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
    *,
    load: Load | None = None,
    token: str | None,
    receive_transform: Transform | Sequence[Transform] | None = None,
    max_bytes: int = 64 << 30,
) -> EngineApp:
    """Return an ASGI application by which ``HTTPWeightSyncScheme`` updates an engine in this process.

    Serve it with any ASGI server, in one process (``uvicorn --workers 1``), or mount it in an application of your own
    (``app.mount("/weights", engine_app(…))``). A version is collected first: it takes its size in memory. When all of
    it has arrived and fits, it is loaded inside ``wsync.gate()``. A version that is incomplete, damaged or malformed is
    not loaded at all. If loading fails half-way, the gate raises ``WeightSyncError`` until a version is
    loaded.

    Args:
        model: a module (its forwards are gated), or a mapping of tensors, into which weights are copied.
        load: for an inference engine: see ``WeightSyncScheme.init_on_receiver``. Always called in the same thread,
            which is not the main one: it has to set the CUDA device, if it needs one.
        token: requests without this bearer token are refused before their bodies are read. None: any process that
            reaches the port can change the weights.
        receive_transform: see ``WeightSyncScheme``.
        max_bytes: the largest version that is accepted.

    Raises:
        TypeError: ``model`` is of another kind. ValueError: the token is malformed.
    """
    require_valid_token(token)
    try:
        from wsync.engine.server import EngineApp
    except ModuleNotFoundError as error:
        raise missing_extra(error, "engine") from error
    transform = compose(receive_transform, "receive_transform")
    destination = Destination(model, load=load, transform=transform)
    if destination.module is not None:
        gate_model(destination.module)
    return EngineApp(destination, max_bytes, token)
