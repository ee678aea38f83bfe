from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from wsync.types import SyncReport

Spot = tuple[dict[str, Any], str]

class Room:
    def __init__(self, views: Sequence[Tensor], shared: bool, /) -> None: ...
    def fill(self, tensors: list[Tensor], /) -> bool: ...

class Tree:
    def __init__(
        self,
        places: tuple[Spot, ...],
        links: tuple[tuple[dict[str, Any], str, Any], ...],
        vacant: tuple[Spot, ...],
        tables: tuple[dict[str, Any], ...],
        /,
    ) -> None: ...
    def tensors(self) -> list[Tensor] | None: ...

class Board:
    def __init__(self, words: memoryview, workers: int, block: int, extra: int, nbytes: int, /) -> None: ...
    def update(
        self,
        rooms: list[Room | None],
        descriptors: bytes,
        retains: bool,
        watch: Watch | None,
        tensors: Tree | list[Tensor],
        version: int,
        timeout: float | None,
        began: float,
        /,
    ) -> SyncReport | tuple[SyncReport, int, list[int], bytes] | None: ...

class Watch:
    def __init__(self, descriptors: bytes, /) -> None: ...
    def sees(self) -> bool: ...

class Installer:
    def __init__(
        self,
        tree: Tree,
        tensors: tuple[Tensor, ...],
        bound: tuple[tuple[Tensor, int], ...],
        copied: tuple[tuple[Tensor, int], ...],
        bump: Callable[[], object],
        /,
    ) -> None: ...
    def install(self, views: Sequence[Tensor], /) -> bool: ...

class Turnstile:
    lock: Any
    depth: int
    feeds: tuple[Any, ...]
    def __init__(self, lock: Any, /) -> None: ...
    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any: ...
    def go_through(self) -> None: ...
    def enter(self, depth: int, /) -> None: ...
    def leave(self, depth: int, /) -> None: ...

class Seat:
    version: int
    slot: int
    refused: int
    hold: bool
    busy: bool
    def follow(self, receiver: object, turnstile: object, /) -> None: ...
    def take(self, words: memoryview, at: int, /) -> None: ...
    def arm(
        self,
        installer: Installer,
        rooms: list[Room | None],
        staged: dict[int, Any],
        fd: int,
        worker: int,
        retains: bool,
        /,
    ) -> None: ...
    def disarm(self) -> None: ...
    def enter(self) -> bool: ...
    def leave(self) -> None: ...
    def on_readable(self) -> bool: ...
    def quit(self) -> None: ...

REVISION: int

def use(
    table: object,
    types: tuple[type, ...],
    report: type,
    phases: tuple[str, ...],
    get_num_threads: Callable[[], int],
    /,
) -> None: ...
