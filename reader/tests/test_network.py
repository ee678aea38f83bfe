"""A reader on another machine, over a link that loses 5 % of all packets and is cut: exact, or the version it had."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bad_link import HERE, INSIDE, bad_link
from conftest import Trainer
from test_session import free_port
from test_store import BEGIN, served

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not os.access("/dev/net/tun", os.W_OK), reason="needs root and /dev/net/tun"
)
LARGE = "made = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 7, bias=False))\n"
READER = """
import hashlib, json, sys, wsync_reader
reader = wsync_reader.open(sys.argv[1])
received = reader.newest
while True:
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in reader.newest.items()}
    if received is not None:
        print(json.dumps([reader.newest.version, digests, ""]), flush=True)
    try:
        received = reader.receive(0.5)
    except wsync_reader.NotConnected as error:
        received = None
        print(json.dumps([reader.version, digests, str(error)]), flush=True)
"""


class Seen:
    """What a reader in the other network prints, as it comes."""

    def __init__(self, url: str) -> None:
        command = [*INSIDE, sys.executable, "-c", READER, url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.rows: list[tuple[int, dict[str, str], str]] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.rows.append(json.loads(line))
                self._changed.notify_all()

    def wait(self, condition: Callable[[], Any], timeout: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout), self.rows[-3:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def seen_from(url: str) -> Iterator[Seen]:
    seen = Seen(url)
    try:
        yield seen
    finally:
        seen.kill()


def check(seen: Seen, sent: dict[int, dict[str, str]]) -> None:
    """Every version is what was sent as that version, and they only rise."""
    assert all(digests == sent[version] for version, digests, _ in seen.rows)
    versions = [version for version, *_ in seen.rows]
    assert versions == sorted(versions)


SEND = "d = scatter(made)\nreport = scheme.send()\n[scheme.version, d]"


@pytest.mark.parametrize("seconds", [2.0, 14.0])
def test_a_worker_over_a_link_that_loses_packets_and_is_cut(trainer: Trainer, seconds: float) -> None:
    with bad_link(0.05) as link:
        port = free_port()
        first = trainer.do(
            LARGE + f"scheme = wsync.DistributedWeightSyncScheme(host={HERE!r}, port={port}, timeout=60.0)\n"
            "d = scatter(made)\nscheme.init_on_sender('policy', model=made, num_workers=1)\nd"
        )
        sent = {1: first}
        trainer.begin("scheme.connect()")
        with seen_from(f"tcp://{HERE}:{port}") as seen:
            trainer.end()
            for _ in range(20):
                version, digests = trainer.do(SEND)
                sent[version] = digests
            link.cut = True
            cut = time.monotonic()
            trainer.do("scheme.timeout = 1.0")
            trainer.begin("d = scatter(made)\nscheme.send()")
            assert "SyncTimeout" in (error := trainer.error()) and "worker 0" in error
            sent[max(sent) + 1] = trainer.do("d")
            threading.Event().wait(cut + seconds - time.monotonic())  # the length of the cut
            link.cut = False
            if seconds > 10.0:  # both ends have given the connection up
                seen.wait(lambda: any("is kept" in error for *_, error in seen.rows))
                trainer.do("scheme.readmit(0, timeout=40.0)")
            trainer.do("scheme.timeout = 40.0")
            whole = time.monotonic()
            for _ in range(5):
                version, digests = trainer.do(SEND)
                sent[version] = digests
            seen.wait(lambda: seen.rows[-1][0] == version)
            check(seen, sent)
            print(f"cut of {seconds} s: {len(seen.rows)} rows, {link.dropped} of {link.dropped + link.carried} packets "
                  f"dropped, five sends after it in {time.monotonic() - whole:.1f} s")  # fmt: skip
        trainer.do("scheme.shutdown()")


def test_a_store_over_a_link_that_loses_packets_and_is_cut(trainer: Trainer, tmp_path: Path) -> None:
    with bad_link(0.05) as link, served(tmp_path, HERE) as url:
        sent = {1: trainer.do(BEGIN.replace("made = model()", LARGE).format(url=str(tmp_path), form={}))}
        with seen_from(url) as seen:
            for number in range(30):
                version, digests = trainer.do(SEND)
                sent[version] = digests
                link.cut = 10 <= number < 20
                if number == 19:
                    seen.wait(lambda: any("is kept" in error for *_, error in seen.rows))
                    link.cut = False
                seen.wait(lambda: seen.rows and (link.cut or seen.rows[-1][0] == max(sent)))
            check(seen, sent)
            print(f"{len(seen.rows)} rows, {link.dropped} of {link.dropped + link.carried} packets dropped")
