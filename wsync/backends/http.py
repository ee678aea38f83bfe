"""Engines over HTTP: the trainer drives each one through the phases of vLLM's native weight transfer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import ClassVar, NoReturn

from wsync.engine.client import BodyTransfer, EngineClient, MakeTransfer, checked_url
from wsync.engine.outlet import Engines
from wsync.engine.protocol import PAUSE_MODES, PauseMode, require_valid_token
from wsync.receiver import Receiver
from wsync.scheme import WeightSyncScheme
from wsync.transforms import Transform


class HTTPWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization with inference engines that are HTTP servers.

    Engines are taken side by side through the four phases of vLLM's native weight transfer: *init* once for a layout,
    then for each version *start*, *update* and *finish*. The weights are bodies of HTTP requests, which the engines of
    ``wsync.engine_app`` take; ``docs/engines.md`` shows a ``transfer`` for vLLM's own engines.

    Worker ``i`` is the engine of ``urls[i]``. A finished ``send`` means: each engine has loaded the version. Errors
    name the URL, the phase and the answer. ``readmit(i)`` sends an engine that has been started again the newest
    version.

    Args:
        urls: the URLs of the engines (``"http://10.0.0.5:8000"``); one or several. Weights go to no other host:
            redirects are errors, proxies are not used.
        token: sent as a bearer token. It is readable on the way unless the URL is ``https``.
        pause: what happens to generations in flight, around the last three phases: ``"abort"`` ends them, ``"wait"``
            waits for their end, ``"keep"`` has them go on with the new weights (mixed versions); None: nothing is
            paused. For engines that have these routes, as vLLM's.
        transfer: a function ``(EngineClient, VersionSource) → object with send_weights()``; None: HTTP bodies.
        sync, timeout, send_transform: as in ``WeightSyncScheme``; ``connect`` waits for engines that are starting.

    Raises:
        ValueError: no URL, a malformed or repeated one, an unknown ``pause``, a bad token.
    """

    name = "http"
    collectors: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        pause: PauseMode | None = None,
        transfer: MakeTransfer | None = None,
        sync: bool = True,
        timeout: float | None = 60.0,
        send_transform: Transform | Sequence[Transform] | None = None,
    ) -> None:
        super().__init__("tensordict", sync, timeout=timeout, send_transform=send_transform)
        self.urls = [checked_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls has each engine once, and at least one: {self.urls}")
        if pause is not None and pause not in PAUSE_MODES:
            raise ValueError(f"pause is {', '.join(map(repr, PAUSE_MODES))} or None, not {pause!r}")
        require_valid_token(token)
        self.token = token
        self.pause: PauseMode | None = pause
        self.transfer = transfer

    def make_outlet(self, model_id: str, num_workers: int) -> Engines:
        scheme = weakref.proxy(self)  # a scheme that is dropped is closed
        clients = [EngineClient(url, self.token) for url in self.urls]
        return Engines(clients, self.transfer or BodyTransfer, self.pause, lambda: scheme.timeout)

    def implied_worker_counts(self) -> Mapping[str, int]:
        return {"urls": len(self.urls)}

    def make_connection(self, model_id: str, receiver: Receiver) -> NoReturn:
        raise RuntimeError("an engine over HTTP receives by wsync.engine_app(load=…), in the engine's process")
