"""A reader as a worker of a trainer: exact, acknowledged, named when it dies; what it keeps when the trainer does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import Trainer
from test_store import digests, values

import wsync_reader

SCHEMES = {
    "shared_mem": "wsync.SharedMemWeightSyncScheme()",
    "published": "wsync.SharedMemWeightSyncScheme(acknowledge='published')",
    "multiprocess": "wsync.MultiProcessWeightSyncScheme()",
    "gloo": "wsync.DistributedWeightSyncScheme(inline_bytes=0)",
    "delta": "wsync.DistributedWeightSyncScheme(send_transform=[wsync.transforms.Delta()])",
}


def begin(trainer: Trainer, scheme: str = SCHEMES["shared_mem"], workers: int = 1) -> str:
    """Have a trainer wait for its workers; return its address."""
    address = trainer.do(
        f"made = model(1)\nscheme = {scheme}\nscheme.init_on_sender('policy', model=made, num_workers={workers})\n"
        "scheme.address"
    )
    trainer.begin("scheme.connect()")
    return address


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_finished_send_is_what_the_next_block_has(trainer: Trainer, scheme: str) -> None:
    address = begin(trainer, SCHEMES[scheme])
    with wsync_reader.open(address) as reader:
        trainer.end()
        assert reader.version == 1
        for version in range(2, 12):
            sent = trainer.do(f"d = scatter(made); made[0].weight.data[0, 0] = {version}; scheme.send(); d")
            with reader.weights() as weights:
                assert weights.version == version and weights["0.weight"][0, 0] == version
                assert {name: one for name, one in digests(weights).items() if name != "0.weight"} == {
                    name: one for name, one in sent.items() if name != "0.weight"
                }
        row = trainer.do("[dict(row, where=None) for row in scheme.verify()][0]")
        assert (row["installed"], row["state"], row["used"], row["error"]) == (11, "alive", 11, "")
        trainer.begin("fill(made, 5)\nscheme.verify()")
        assert "with other values, or none, of '" in trainer.error()
        trainer.do("scheme.shutdown()")
        assert reader.receive(20.0) is not None  # the versions of the blocks were not returned
        assert reader.receive(20.0) is None and reader.finished and reader.closed
        with pytest.raises(wsync_reader.NotConnected, match="has shut down"):
            reader.receive()
        with reader.weights() as weights:
            assert weights.version == 11


def test_it_joins_by_host_and_port_beside_a_worker_with_torch(trainer: Trainer, mortal: Trainer) -> None:
    port = free_port()
    pickled = trainer.do(
        f"import pickle\nmade = model(1)\nscheme = wsync.DistributedWeightSyncScheme(port={port})\n"
        "scheme.init_on_sender('policy', model=made, num_workers=2)\npickle.dumps(scheme).hex()"
    )
    trainer.begin("scheme.connect()")
    mortal.begin(
        f"import pickle\nmade = model()\nscheme = pickle.loads(bytes.fromhex({pickled!r}))\n"
        "scheme.init_on_receiver('policy', model=made, worker_idx=0)\nscheme.connect()"
    )
    with wsync_reader.open(f"tcp://127.0.0.1:{port}", worker=1) as reader:
        mortal.end()
        trainer.end()
        for value in range(2, 20):
            trainer.do(f"fill(made, {value}); scheme.send()")
            with reader.weights() as weights:
                assert values(weights) == {float(value)}
        assert mortal.do("made[0].weight.min().item()") == 19.0
        mortal.kill()
        trainer.begin("fill(made, 20); scheme.send()")
        error = trainer.error()
        assert "worker 0" in error and "workers that have it: 1" in error and reader.version == 20
        trainer.do("scheme.shutdown()")


def test_what_differs_is_refused(trainer: Trainer) -> None:
    port = free_port()
    begin(trainer, f"wsync.DistributedWeightSyncScheme(port={port})")
    address = f"tcp://127.0.0.1:{port}"
    for wrong, error in [
        ({"key": "another"}, "another key"),
        ({"model": "critic"}, "rejected by the sender.*asks for"),
        ({"worker": 7}, "index 7 is out of range"),
    ]:
        with pytest.raises(wsync_reader.NotConnected, match=error):
            wsync_reader.open(address, timeout=10.0, **wrong)
    with pytest.raises(wsync_reader.NotConnected, match="is not reached"):
        wsync_reader.open(f"tcp://127.0.0.1:{free_port()}", timeout=10.0)
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        wsync_reader.open("tcp://127.0.0.1")
    with wsync_reader.open(address):
        trainer.end()
        with pytest.raises(wsync_reader.NotConnected, match="index 0 is taken"):
            wsync_reader.open(address)
    trainer.do("scheme.shutdown()")


READER = """
import json, sys, wsync_reader
reader = wsync_reader.open(sys.argv[1])
while True:
    print(json.dumps(reader.version), flush=True)
    reader.receive()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_reader_is_named_and_a_stopped_one_is_late(trainer: Trainer, end: int) -> None:
    address = begin(trainer)
    command = [sys.executable, "-c", READER, address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and json.loads(process.stdout.readline()) == 1
    trainer.end()
    os.kill(process.pid, end)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    started = time.monotonic()
    trainer.begin("scheme.timeout = 2.0\nscheme.send()")
    error = trainer.error()
    assert ("WorkerDied" if end == signal.SIGKILL else "SyncTimeout") in error and "worker 0" in error
    assert time.monotonic() - started < 4.0
    process.kill()
    process.communicate()
    trainer.begin("scheme.readmit(0, timeout=30.0)")
    with wsync_reader.open(address) as reader:
        trainer.end()
        assert trainer.do("scheme.send().version") == reader.version
    trainer.do("scheme.shutdown()")


def test_it_keeps_its_version_when_the_trainer_dies_and_joins_the_next(mortal: Trainer, trainer: Trainer) -> None:
    port = free_port()
    scheme = f"wsync.DistributedWeightSyncScheme(port={port})"
    begin(mortal, scheme)
    with wsync_reader.open(f"tcp://127.0.0.1:{port}") as reader:
        mortal.end()
        mortal.do("fill(made, 7); scheme.send(); scheme.send()")
        assert reader.receive(20.0) is not None
        mortal.kill()
        with pytest.raises(wsync_reader.NotConnected, match="version 3 is kept"):
            reader.receive()
        assert reader.error != "" and not reader.closed
        with reader.weights() as weights:
            assert weights.version == 3 and values(weights) == {7.0}
        begin(trainer, scheme)
        trainer.end()
        received = reader.receive(20.0)
        assert received is not None and received.version == 1 and values(received) == {1.0} and reader.error == ""
        trainer.do("scheme.shutdown()")


def test_it_is_of_the_trainers_version(trainer: Trainer) -> None:
    import wsync_reader.wire

    versions = trainer.do("from wsync.control.auth import PROTOCOL\n[wsync.__version__, PROTOCOL]")
    assert versions == [wsync_reader.__version__, wsync_reader.wire.PROTOCOL]


def test_newest_wins_and_versions_only_rise(trainer: Trainer) -> None:
    address = begin(trainer)
    with wsync_reader.open(address) as reader:
        trainer.end()
        trainer.begin(
            "for value in range(2, 400):\n    scheme.send_async(fill(made, value))\nscheme.wait_async().version"
        )
        seen, last = set[int](), 1
        while last < 399:
            with reader.weights() as weights:
                assert values(weights) == {float(weights.version)} and weights.version >= last
                last = weights.version
                seen.add(last)
        assert trainer.end() == 399 and len(seen) > 3
    trainer.do("scheme.shutdown()")


def test_a_reader_that_fetches(trainer: Trainer) -> None:
    address = begin(trainer, "wsync.MultiProcessWeightSyncScheme(initiator='receiver')")
    with wsync_reader.open(address) as reader:
        trainer.end()
        assert reader.version == 1
        trainer.do("for value in (2, 3, 4):\n    scheme.send(fill(made, value))\n0")
        received = reader.receive(20.0)
        assert received is not None and received.version == 4 and values(received) == {4.0}
        assert reader.receive(0.1) is None
    trainer.do("scheme.shutdown()")


def test_models_of_a_transaction_arrive_together_or_not_at_all(trainer: Trainer) -> None:
    addresses = trainer.do(
        "schemes = {}\n"
        "for name in ('actor', 'critic'):\n"
        "    schemes[name] = wsync.MultiProcessWeightSyncScheme(timeout=20.0)\n"
        "    schemes[name].init_on_sender(name, model=model(1), num_workers=1)\n"
        "{name: scheme.address for name, scheme in schemes.items()}"
    )
    trainer.begin("for scheme in schemes.values():\n    scheme.connect()\n0")
    with (
        wsync_reader.open(addresses["actor"], model="actor") as actor,
        wsync_reader.open(addresses["critic"], model="critic") as critic,
    ):
        trainer.end()
        trainer.begin(
            "for value in range(2, 100):\n    wsync.synchronize({s: model(value) for s in schemes.values()})\n0"
        )
        seen = set[float]()
        while 99.0 not in seen:
            with wsync_reader.gate(actor, critic) as (one, other):
                assert values(one) == values(other)
                seen |= values(one)
        trainer.end()
        critic.close()
        trainer.begin("wsync.synchronize({s: model(100) for s in schemes.values()})")
        assert "critic" in trainer.error() and actor.version == 99
    trainer.do("for scheme in schemes.values():\n    scheme.shutdown()\n0")


def test_a_reader_that_closes_says_so(trainer: Trainer) -> None:
    address, before = begin(trainer), len(os.listdir("/proc/self/fd"))
    reader = wsync_reader.open(address)
    trainer.end()
    reader.close()
    reader.close()
    trainer.begin("scheme.send()")
    assert "it has shut down" in trainer.error()
    assert len(os.listdir("/proc/self/fd")) == before and reader.receive() is None
    trainer.do("scheme.shutdown()")
