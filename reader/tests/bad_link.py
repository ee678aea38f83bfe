"""A network of two, over a link that loses packets and is cut: this process carries each packet, or drops it."""

import fcntl
import os
import random
import select
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NAME, HERE, THERE = "wsync-reader", "10.211.9.1", "10.211.9.2"
INSIDE = ["ip", "netns", "exec", NAME]
_SET_NAME, _PLAIN_PACKETS = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI


class Link:
    """The link. ``loss``: the share of packets that are dropped; ``cut``: whether all are."""

    def __init__(self, loss: float) -> None:
        self.loss, self.cut = loss, False
        self.carried = self.dropped = 0
        self._ends = [self._device(f"{NAME}{end}") for end in "ab"]
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._carry)

    def start(self) -> None:
        """Begin to carry packets: both devices are up."""
        self._thread.start()

    def _device(self, name: str) -> int:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _SET_NAME, struct.pack("16sH22x", name.encode(), _PLAIN_PACKETS))
        return descriptor

    def _carry(self) -> None:
        chance = random.Random(0)
        while True:
            ready, _, _ = select.select([*self._ends, self._stop], [], [])
            if self._stop in ready:
                return
            for end in ready:
                packet = os.read(end, 1 << 16)
                if self.cut or chance.random() < self.loss:
                    self.dropped += 1
                else:
                    self.carried += 1
                    os.write(self._ends[end == self._ends[0]], packet)

    def close(self) -> None:
        os.write(self._stopped, b"1")
        if self._thread.is_alive():
            self._thread.join()
        for descriptor in (*self._ends, self._stop, self._stopped):
            os.close(descriptor)


@contextmanager
def bad_link(loss: float) -> Iterator[Link]:
    """Needs root, ``ip`` and ``/dev/net/tun``."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", NAME)
    try:
        link = Link(loss)
        try:
            ip("link", "set", f"{NAME}b", "netns", NAME)
            ip("addr", "add", HERE, "peer", THERE, "dev", f"{NAME}a")
            ip("link", "set", f"{NAME}a", "up")
            ip("-n", NAME, "addr", "add", THERE, "peer", HERE, "dev", f"{NAME}b")
            ip("-n", NAME, "link", "set", f"{NAME}b", "up")
            link.start()
            yield link
        finally:
            link.close()
    finally:
        ip("netns", "delete", NAME)
