"""``ledger`` and ``verify``: which version is where, and is it the right one? What users have reported is planted."""

import copy
import json
import os
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from backends import BuiltIn, SharedMemoryPublished, needs_arena
from programs import run_program
from small_models import linear, make_engine, make_trained
from torch import nn
from workers_here import in_process

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import scramble
from wsync.transforms import Cast, Dequantize, Exclude, Fuse, QuantizeInt8, Rename


def execute(state: WorkerState, statement: str) -> None:
    exec(statement, {"model": state.models["policy"], "torch": torch, "copy": copy})


def seen(scheme: wsync.WeightSyncScheme, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in columns) for row in scheme.ledger()]


def test_the_ledger_has_a_row_for_each_worker(backend: BuiltIn) -> None:
    with backend.connected() as session:
        session.update(2)
        assert [row["used"] for row in session.scheme.verify()] == [0, 0]
        session.outputs()
        assert all(row["sent_at"] < row["installed_at"] < row["used_at"] for row in session.scheme.verify())
        told = [(f"pid {worker.pid}", "alive", 2, 2, 2, 0, "") for worker in session.workers]
        assert seen(session.scheme, "where", "state", "sent", "installed", "used", "behind", "error") == told
        session.workers[1].stop()  # it never installs
        session.post(3)
        with pytest.raises(wsync.SyncTimeout, match=r"not verified on worker 1: .*\nworkers that have it: 0"):
            session.scheme.verify(timeout=2.0)
        assert seen(session.scheme, "sent", "installed", "behind") == [(3, 3, 0), (3, 2, 1)]
        session.workers[1].resume()
        assert [row["verified"] for row in session.scheme.verify()] == [3, 3]
        session.workers[1].kill()
        with pytest.raises(wsync.WorkerDied):
            session.update(4)
        assert seen(session.scheme, "state") == [("alive",), ("dead",)]
        assert [row["verified"] for row in session.scheme.verify()] == [4, None]


SWAP = "model.q.weight.data, model.k.weight.data = model.k.weight.data, model.q.weight.data"
PLANTED = [("model.v.bias.data.view(torch.int32)[3] ^= 1", "v.bias"), (SWAP, "q.weight'; 'k.weight")]


@pytest.mark.parametrize(("plant", "names"), [*PLANTED, ("del model.k.bias", "k.bias")])
def test_verify_names_the_tensors_that_differ(backend: BuiltIn, plant: str, names: str) -> None:
    with backend.connected(make=make_trained) as session:
        session.scheme.send(scramble(session.model, 7))
        assert len({row["digest"] for row in session.scheme.verify()} - {None}) == 1
        session.workers[1].call(execute, plant)
        with pytest.raises(wsync.WorkerFailed, match=rf"(?m)not verified on workers? (0, )?1: .* '{names}'$"):
            session.scheme.verify()
        assert session.scheme.ledger()[1]["verified"] is None


def test_what_is_installed_is_compared_after_all_transforms(pool: WorkerPool) -> None:
    qkv, names = ["q.*", "k.*", "v.*"], {"embed.weight": "tokens.weight"}
    send = [Exclude("head"), Fuse({"qkv.*": qkv}), Rename(names), QuantizeInt8(only="qkv.weight")]
    options: dict[str, Any] = {"send_transform": send, "receive_transform": [Dequantize(), Cast("bfloat16")]}
    with pool.group(1) as workers, wsync.MultiProcessWeightSyncScheme(**options) as scheme:
        scheme.init_on_sender("policy", model=make_trained(), num_workers=1)
        workers[0].start(commands.join, scheme, make_engine, 0, "policy")
        scheme.connect()
        workers[0].result()
        assert scheme.verify()[0]["verified"] == 1


@needs_arena
@pytest.mark.parametrize("gate", [False, True])  # if it is gated, the worker acts with a copy
def test_an_update_that_reaches_nothing_is_seen(gate: bool) -> None:
    with SharedMemoryPublished().connected(1, make=make_trained, gate=gate) as session:
        session.scheme.verify()  # the worker's control thread has nothing left to do
        for _ in range(3):
            session.scheme.send()
            session.workers[0].call(execute, f"{'copy.deepcopy(model)' if gate else 'model'}.q(torch.zeros(16))")
        assert seen(session.scheme, "sent", "installed", "behind") == [(4, 1, 3)]
        assert session.scheme.verify()[0]["used"] == 0


@pytest.mark.usefixtures("group")
def test_wrapped_models_have_the_names_of_the_plain_ones(pool: WorkerPool) -> None:
    with pool.group(2) as workers, wsync.MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=nn.parallel.DistributedDataParallel(make_trained()), num_workers=2)
        compiled, wrapped = partial(torch.compile, make_trained()), partial(nn.ModuleDict, {"body": make_trained()})
        workers[0].start(commands.join, scheme, compiled, 0, "policy")
        workers[1].start(commands.join, scheme, wrapped, 1, "policy")
        with pytest.raises(wsync.WorkerFailed, match=r"worker 1: .*'q.bias'"):
            scheme.connect()
        with pytest.raises(Exception, match="LayoutMismatch"):
            workers[1].result()
        assert workers[0].result() == 1
        assert seen(scheme, "state") == [("alive",), ("never connected",)]
        assert "it has no 'k.bias'" in scheme.ledger()[1]["error"]


def test_two_runs_in_one_store_are_seen(tmp_path: Path) -> None:
    with wsync.StoreWeightSyncScheme(tmp_path) as one, wsync.StoreWeightSyncScheme(tmp_path) as other:
        for scheme in (one, other):
            scheme.init_on_sender(model=linear(1))
            scheme.connect()  # publishes the first version
        assert seen(one, "state", "error") == [("not known", "another trainer publishes in this store")]
        assert seen(other, "where", "error") == [(str(tmp_path / "policy"), "")]
        with pytest.raises(wsync.WeightSyncError, match="readers of a store"):
            other.verify()


def status(source: str | Path) -> subprocess.CompletedProcess[str]:
    program = Path(wsync.__file__).parents[1] / "wsync_status.py"
    return run_program(program, "status", str(source), folder=Path(), status=None)


def test_the_rows_are_served_and_shown(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with in_process(linear(0), linear(1), "actor") as scheme:
        scheme.model(torch.zeros(2))
        server = wsync.serve_metrics(0)
        with server, urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            assert 'wsync_installed{model="actor",scheme="shared_mem",worker="0"} 1.0' in answer.read().decode()
            shown = status(f"127.0.0.1:{server.server_port}")
            server.shutdown()
        rows = scheme.ledger()
    assert shown.returncode == 0 and rows[0]["where"] in shown.stdout
    assert "wsync status: " in status(tmp_path / "none").stderr
    assert status("--help").stdout.startswith("usage: ")
    with subprocess.Popen(["sleep", "600"]) as process:
        of_run = {"trainer": f"{socket.gethostname()}:{process.pid}", "sent_at": 1000.0}
        (tmp_path / "ledger.json").write_text(json.dumps([rows[0] | of_run]))
        os.utime(tmp_path / "ledger.json", (1005, 1005))
        assert (now := status(tmp_path)).returncode == 0 and "alive" in now.stdout and " 5 s " not in now.stdout
        process.kill()
    assert (left := status(tmp_path)).returncode == 1 and "dead" in left.stdout and " 5 s " in left.stdout
    (tmp_path / "summary.json").write_text('{"error": "WorkerDied: version 4"}')
    assert (failed := status(tmp_path)).returncode == 1 and "ended" in failed.stdout and "version 4" in failed.stdout
    (tmp_path / "summary.json").write_text('{"error": null}')
    assert (over := status(tmp_path)).returncode == 0 and "ended" in over.stdout and " 5 s " in over.stdout


def test_updates_are_spans_of_opentelemetry() -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(trace.export.SimpleSpanProcessor(memory))
    wsync.trace_updates(provider)
    with in_process(linear(0), linear(1), "actor") as scheme:
        scheme.model(torch.zeros(2))
        report = scheme.send()
    (span,) = memory.get_finished_spans()
    assert report is not None and span.name == "wsync.update" and span.attributes["wsync.version"] == report.version
    assert abs((span.end_time - span.start_time) * 1e-9 - report.seconds) < 1e-6
