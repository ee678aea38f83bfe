"""The only way to a listening socket, so that no door is open to every network that this machine is in."""

from __future__ import annotations

import socket

from wsync.errors import NotConnected


def listen_on(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on ``host``, and on no other address.

    Args:
        host: an address of this machine, which workers are told.
        port: 0 for any that is free.

    Raises:
        NotConnected: this machine has no such address, or somebody listens there already; or it is every interface.
    """
    if not host:
        raise NotConnected("host is empty: it has to be an address of this machine, which workers reach")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where = f"host={host}" + (f" port {port}" if port else "")
    try:
        meant = {address[0] for *_, address in socket.getaddrinfo(host, port, family)}
        if meant & {"0.0.0.0", "::"}:
            raise NotConnected(f"host={host} is every interface: name an address of this machine, which workers reach")
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise NotConnected(f"cannot listen on {where}, which has to be an address of this machine: {error}") from error
