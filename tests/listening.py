"""Where a process can be reached."""

from collections.abc import Iterator
from pathlib import Path

LOOPBACK, LOOPBACK_6 = "0100007F", "00000000000000000000000001000000"
"""127.0.0.1 and ::1, as the kernel writes them."""


def own_sockets() -> dict[str, int]:
    """Descriptors of this process, by the names of their sockets in ``/proc``."""
    return {path.readlink().name: int(path.name) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def listening_tcp() -> Iterator[tuple[int, str, int]]:
    """Of each TCP socket on which this process listens: descriptor, address as the kernel writes it, port."""
    mine = own_sockets()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            columns = row.split()
            if columns[3] == "0A" and (name := f"socket:[{columns[9]}]") in mine:
                address, port = columns[1].split(":")
                yield mine[name], address, int(port, 16)


def listening() -> set[str]:
    """Addresses on which something of this process listens."""
    return {address for _, address, _ in listening_tcp()}
