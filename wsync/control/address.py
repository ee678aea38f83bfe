"""Where a sender listens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Address:
    """Where a sender listens, and the token that a worker must have. A pickled scheme contains it.

    Attributes:
        host: an IP address or host name; empty for a Unix socket.
        port: its port; for a Unix socket, the abstract name.
        token: secret, random.
    """

    host: str
    port: int | str
    token: bytes = field(repr=False)

    @property
    def public(self) -> bytes:
        """The address without the token. The credentials authenticate it: see ``credentials.py``."""
        return f"{self.host} {self.port}".encode()

    def dump(self) -> str:
        """Return the address as JSON. It contains the token: send it only over trusted media."""
        return json.dumps([self.host, self.port, self.token.hex()])

    @classmethod
    def load(cls, text: str | bytes) -> Address:
        """Parse the output of ``dump``; ValueError if ``text`` is something else."""
        try:
            host, port, token = json.loads(text)
            return cls.checked(host, port, bytes.fromhex(token))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError("this is not the address of a sender") from error

    @classmethod
    def checked(cls, host: Any, port: Any, token: bytes) -> Address:
        """Return an address; ``host`` and ``port`` come from parsed JSON, ValueError if they are not valid."""
        valid_port = (type(port) is int and 0 < port < 65536) if host else isinstance(port, str) and port != ""
        if not isinstance(host, str) or not valid_port or not token:
            raise ValueError("host, port and token are missing or invalid")
        return cls(host, port, token)
