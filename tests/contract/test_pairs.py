"""Two calls at once, or one after the other: what the first has begun does not harm the second."""

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import ProcessError
from pathlib import Path
from typing import Any

import pytest
from asgi_server import serve
from backends import BuiltIn, DistributedInline, SharedMemory
from test_fail_stop import interrupted_after
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from workers_here import model_of

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, WithExtraState, fill, make_large


def forward_until(state: WorkerState, version: int) -> None:
    while state.schemes["policy"].version < version:
        state.models["policy"]()


def test_verify_beside_forwards_that_have_to_fetch(pool: WorkerPool) -> None:
    DistributedInline.pool = pool
    options = {"initiator": "receiver", "max_staleness": 0, "timeout": 20.0}
    with DistributedInline().connected(1, make_large, **options) as session:
        session.workers[0].start(forward_until, 9)
        for value in range(2, 10):
            session.send(value)
            with suppress(wsync.WorkerFailed):  # it has not fetched this version yet
                session.scheme.verify(timeout=20.0)
        session.workers[0].result()


def join_when_free(state: WorkerState, scheme: wsync.WeightSyncScheme) -> int:
    """Join as worker 0, as soon as that index is not taken."""
    state.schemes["policy"], state.models["policy"] = scheme, Small()
    scheme.init_on_receiver("policy", model=state.models["policy"], worker_idx=0)
    while True:
        with suppress(wsync.NotConnected):
            return commands.connect(state)


def test_readmit_replaces_a_hung_worker_that_had_joined_by_itself(backend: BuiltIn) -> None:
    with backend.connected(1) as session, backend.workers(2) as others:
        session.workers[0].kill()
        with pytest.raises(wsync.WorkerDied):
            for value in range(2, 1000):
                session.update(value)
        session.begin_join(others[0], 0)
        others[0].result()
        others[0].stop()
        others[1].start(join_when_free, session.scheme)
        session.scheme.readmit(0, others[1]._process)
        others[1].result()
        session.update(-1)
        assert others[1].call(commands.output)[0] == -1


def test_a_death_is_named_also_after_a_connect_that_was_interrupted() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=20.0) as scheme, subprocess.Popen(["sleep", "600"]) as process:
        scheme.init_on_sender("policy", num_workers=1)
        with interrupted_after(0.2):
            scheme.connect(processes=[process])
        killer = threading.Timer(0.2, process.kill)
        killer.start()
        with pytest.raises(wsync.WorkerDied, match="SIGKILL"):
            scheme.connect(processes=[process])
        killer.join()


def test_shutdown_ends_the_search_for_a_sender() -> None:
    scheme = wsync.DistributedWeightSyncScheme(store=HashStore(), timeout=20.0)
    scheme.init_on_receiver("policy", model=nn.Linear(2, 1), worker_idx=0)
    scheme.connect(wait=False)
    started = time.monotonic()
    scheme.shutdown()
    assert time.monotonic() - started < 10.0


def hold_gate(state: WorkerState, seconds: float) -> list[float]:
    with wsync.gate():
        time.sleep(seconds)  # the gate is held that long
    return commands.output(state)


def test_a_version_that_is_reported_as_missing_is_never_installed(backend: BuiltIn) -> None:
    with backend.connected(1, WithExtraState) as session:
        session.workers[0].start(hold_gate, 0.5)
        session.post(2)
        session.model.state = "refuse"
        session.post(3)
        with pytest.raises(wsync.WorkerFailed, match="refused"):
            session.scheme.wait_async()
        assert session.workers[0].result()[0] == session.outputs()[0]
        session.model.state = "accepted"
        session.update(4)
        assert session.outputs() == [4]


def test_an_engine_that_was_disconnected_is_not_missed() -> None:
    apps = [wsync.engine_app(model_of(0), token=None) for _ in range(2)]
    with serve(apps[0]) as first, serve(apps[1]) as second, wsync.HTTPWeightSyncScheme([first, second]) as scheme:
        scheme.init_on_sender("policy", model=model_of(1))
        scheme.connect()
        scheme.disconnect(0)
        assert [*scheme.send(model_of(2)).workers] == [1]


def test_a_fetch_by_a_connection_that_has_ended_says_so(pool: WorkerPool) -> None:
    DistributedInline.pool = pool
    with DistributedInline().connected(1, initiator="receiver") as session:
        session.send(2)
        session.scheme.disconnect(0)
        with pytest.raises(ProcessError, match="NotConnected"):
            session.workers[0].call(commands.pull)


class TellsItsCheck(WithExtraState):
    """Its state is a file, which it makes with the worker's index when it is given it."""

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        if str(state).startswith("/"):
            Path(f"{state}{self.worker_idx}").touch()


def enter_gate(state: WorkerState) -> None:
    state.kept["gate"] = wsync.gate()
    state.kept["gate"].__enter__()


def leave_gate(state: WorkerState) -> None:
    state.kept.pop("gate").__exit__(None, None, None)


def test_a_part_waits_where_the_other_one_was_replaced_and_refused(pool: WorkerPool, tmp_path: Path) -> None:
    SharedMemory.pool, options = pool, {"make": TellsItsCheck, "timeout": 5.0}
    with (
        SharedMemory().connected(2, **options) as actor,
        SharedMemory().join(actor.workers, model_id="critic", **options) as critic,
    ):
        actor.model.state, critic.model.state = str(tmp_path / "actor"), str(tmp_path / "critic")
        worker, other = [*actor.workers]
        other.call(enter_gate)
        updates = {one.scheme: fill(one.model, 2) for one in (actor, critic)}
        with ThreadPoolExecutor() as trainer:
            committed = trainer.submit(wsync.synchronize, updates)
            while len([*tmp_path.glob("*0")]) < 2:  # the worker has checked both
                time.sleep(0.01)
            worker.call(enter_gate)
            other.call(leave_gate)
            with pytest.raises(wsync.SyncTimeout, match="committed"):
                committed.result()
        actor.model.state = "refuse 0"
        actor.post(3)
        worker.call(leave_gate)
        assert worker.call(commands.output) == worker.call(commands.output, "critic")
