"""A worker's scheme, and a sender that follows a script, message by message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wsync
from wsync.backends.none import NoTransport
from wsync.control import Connection, Listener, connect
from wsync.deadlines import deadline_in, wait_readable
from wsync.rendezvous import SocketRendezvous

Script = Callable[[Connection], object]


class ScriptedRendezvous(SocketRendezvous):
    """The sender accepts a connection as soon as the worker makes it, and follows the script."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self._listener = Listener()

    def can_look_up(self) -> bool:
        return True

    def dial(self, address: Any | None, model_id: str, worker: int, deadline: float | None) -> Connection:
        connection = connect(self._listener.address, worker, deadline)
        accepted = None
        while accepted is None:
            assert wait_readable([self._listener.fileno()], deadline_in(30.0))
            accepted = self._listener.accept()
        self._script(accepted[0])
        return connection


class Scripted(wsync.WeightSyncScheme):
    name = "scripted"

    def __init__(self, script: Script, timeout: float | None = 30.0, **options: Any) -> None:
        super().__init__(timeout=timeout, **options)
        self._rendezvous = ScriptedRendezvous(script)

    def create_transport(self, worker_idx: int | None = None) -> NoTransport:
        return NoTransport()

    def create_rendezvous(self) -> ScriptedRendezvous:
        return self._rendezvous
