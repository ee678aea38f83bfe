"""What strangers hit in ``wsync``: one test for each point of issues 57 and 59, by the input that they gave."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from asgi_server import serve
from backends import BuiltIn
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from workers_here import connect, make_worker, model_of

import wsync
from wsync.testing import Worker, WorkerError, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, fill

ROOT = Path(__file__).parents[2]


@contextmanager
def joined(
    backend: BuiltIn, source: nn.Module, make: Callable[[], nn.Module], count: int = 1, **options: Any
) -> Iterator[tuple[wsync.WeightSyncScheme, list[Worker]]]:
    """A sender of ``source``, and workers whose models are made otherwise."""
    with backend.workers(count) as workers, backend.make_scheme(**{"timeout": 20.0, **options}) as scheme:
        scheme.init_on_sender("policy", model=source, num_workers=count)
        for index, worker in enumerate(workers):
            worker.start(commands.join, scheme, make, index, "policy")
        scheme.connect()
        workers.results()
        yield scheme, list(workers)


def in_time(call: Callable[[], object], seconds: float) -> BaseException | None:
    """What ``call`` raises; an AssertionError if it does not end in time."""
    raised = list[BaseException]()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  it is the answer
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"has not ended within {seconds} s"
    return raised[0] if raised else None


# --- 57.4: what cannot be bound, or must not be ---


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


class Reassigns(nn.Linear):
    """Its forward makes a buffer anew."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return super().forward(input)


class Aliased(nn.Linear):
    """Its forward reads a view that was taken when it was made."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.cached = self.weight.detach().t()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.cached + self.bias


def act(state: WorkerState) -> list[float]:
    with torch.inference_mode():
        return state.models["policy"](torch.ones(2)).tolist()


@pytest.mark.parametrize("make", [made_in_inference_mode, Reassigns, Aliased])
def test_4_what_cannot_be_bound_is_copied_or_refused_by_name(backend: BuiltIn, make: Any) -> None:
    source = fill(nn.Linear(2, 2) if make is not Reassigns else Reassigns(), 1)
    with joined(backend, source, make) as (scheme, (worker,)):
        for value in range(2, 6):
            scheme.send(fill(source, value))
            assert worker.call(act) == [3.0 * value] * 2


def embed(state: WorkerState) -> list[float]:
    return state.models["policy"](torch.arange(3)).norm(dim=1).tolist()


def bounded() -> nn.Module:
    return nn.Embedding(3, 4, max_norm=1.0)


def test_4_a_forward_that_writes_its_parameter_changes_no_other_workers_weights(backend: BuiltIn) -> None:
    with joined(backend, fill(nn.Embedding(3, 4), 1), bounded, 2) as (scheme, workers):
        assert workers[0].call(embed) == pytest.approx([1.0] * 3, abs=1e-3)
        assert set(workers[1].call(weight_values)) == {1.0}
        scheme.send(fill(nn.Embedding(3, 4), 2))
        assert set(workers[1].call(weight_values)) == {2.0}


def weight_values(state: WorkerState) -> list[float]:
    with wsync.gate():
        return state.models["policy"].weight.flatten().tolist()


# --- 57.6 to 57.8 ---


class Generating(nn.Linear):
    def forward(self, input: torch.Tensor) -> Iterator[torch.Tensor]:  # type: ignore[override]
        yield super().forward(input)


class Awaited(nn.Linear):
    async def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(input)


@pytest.mark.parametrize("kind", [Generating, Awaited])
def test_6_a_forward_that_is_lazy_is_refused(kind: Any) -> None:
    with wsync.SharedMemWeightSyncScheme() as scheme, pytest.raises((TypeError, wsync.WeightSyncError)):
        scheme.init_in_process("policy", kind(2, 2))
        kind(2, 2)(torch.ones(2))


@pytest.mark.parametrize("wrapped", [True, False])
def test_7_the_names_of_wrappers_are_stripped_at_any_depth_on_both_ends(wrapped: bool) -> None:
    def net(*, wrap: bool) -> nn.Module:
        inner = nn.Linear(2, 2)
        return nn.Sequential(nn.ReLU(), nn.DataParallel(torch.compile(inner)) if wrap else inner)  # type: ignore

    source, model = net(wrap=wrapped), net(wrap=not wrapped)
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", model, fill(source, 3))
        assert {parameter.unique().item() for parameter in model.parameters()} == {3.0}


def test_7_no_remedy_is_proposed_that_loses_a_parameter() -> None:
    source, model = nn.ModuleDict({"body": nn.Linear(2, 2)}), nn.ModuleDict({"trunk": nn.Linear(2, 2)})
    with wsync.SharedMemWeightSyncScheme() as scheme, pytest.raises(wsync.LayoutMismatch) as refused:
        scheme.init_in_process("policy", model, source)
    assert "Rename" in str(refused.value) and "Exclude" not in str(refused.value)


def test_8_a_guard_goes_with_its_scheme() -> None:
    def load(pairs: Any) -> None:
        next(iter(pairs))
        raise ArithmeticError("no memory")

    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=20.0))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        worker = stack.enter_context(make_worker(sender, 0, load=load))
        assert in_time(lambda: connect(sender.connect, worker), 20.0) is not None
    model = nn.Linear(2, 2)
    with wsync.gate(), wsync.SharedMemWeightSyncScheme() as healthy:
        pass
    with wsync.SharedMemWeightSyncScheme() as healthy:
        healthy.init_in_process("policy", model, fill(nn.Linear(2, 2), 2))
        assert model(torch.ones(2)).tolist() == [6.0, 6.0]


# --- 57.17 ---


def test_17_a_numpy_state_dict_is_taken_or_the_error_says_how() -> None:
    model, arrays = nn.Linear(2, 2), {"weight": torch.ones(2, 2).numpy(), "bias": torch.ones(2).numpy()}
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", model)
        try:
            scheme.send(arrays)
        except (TypeError, ValueError, wsync.WeightSyncError) as error:
            assert "torch.from_numpy" in str(error)
        else:
            assert model.weight.unique().tolist() == [1.0]


# --- 59.3, 59.4: statements that nobody made ---


class Noting:
    """A user's store that remembers what was set."""

    def __init__(self, store: TCPStore) -> None:
        self.store, self.keys = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def set(self, key: str, value: Any) -> None:
        self.keys.append(key)
        self.store.set(key, value)


def test_3_a_value_of_one_model_is_no_value_of_another() -> None:
    store: Any = Noting(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    with ExitStack() as stack:
        for value, name in enumerate(("old", "actor"), 1):
            sender = stack.enter_context(wsync.DistributedWeightSyncScheme(store=store, timeout=20.0))
            sender.init_on_sender(name, model=model_of(value), num_workers=1)
            threading.Thread(target=lambda one=sender: suppress(Exception) and one.connect(), daemon=True).start()
        for key in [key for key in store.keys if "old" in key]:
            store.store.set(key.replace("old", "actor"), store.store.get(key))
        worker = stack.enter_context(wsync.DistributedWeightSyncScheme(store=store, timeout=3.0))
        model = model_of(0)
        worker.init_on_receiver("actor", model=model, worker_idx=0)
        with suppress(wsync.WeightSyncError, ValueError):
            worker.connect()
        assert model.weight.unique().tolist() != [1.0], "the weights of another model"


def test_3_an_address_of_another_run_is_none_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("RUN_ID", "one"), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    with wsync.DistributedWeightSyncScheme(timeout=20.0) as sender, ExitStack() as stack:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        connecting = threading.Thread(target=sender.connect)
        connecting.start()
        for run in ("two", "one"):
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
            worker = stack.enter_context(wsync.DistributedWeightSyncScheme(timeout=3.0 if run == "two" else 20.0))
            worker.init_on_receiver("policy", model=model_of(0), worker_idx=0)
            with pytest.raises(wsync.SyncTimeout) if run == "two" else nullcontext():
                worker.connect()
        connecting.join()


NAMED = b'{"weight_version": "1", "wait_seconds": %s}'


@pytest.mark.parametrize(
    "answer",
    [b"<html>please log in</html>", b'{"login": 1}', b'{"weight_version": "7"}', NAMED % b"NaN", NAMED % b"-5"],
)
def test_4_an_answer_that_does_not_fit_what_was_asked_is_no_success(answer: bytes) -> None:
    async def any_page(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    with serve(any_page) as url, wsync.HTTPWeightSyncScheme(url, timeout=5.0) as scheme:
        scheme.init_on_sender("policy", model=Small())
        with pytest.raises(wsync.WeightSyncError, match="worker 0"):
            scheme.connect()
            scheme.send(fill(Small(), 2))


# --- 59.9: calls in the wrong place ---


def test_9_a_shutdown_from_another_thread_ends_a_send_that_waits(backend: BuiltIn) -> None:
    with backend.connected(1, timeout=30.0) as session:
        session.workers[0].stop()
        threading.Timer(0.3, session.scheme.shutdown).start()
        try:
            assert isinstance(in_time(lambda: session.update(2), 10.0), wsync.WeightSyncError)
        finally:
            session.workers[0].resume()


FORKING = """
import os, sys, threading, pickle, torch.nn as nn, wsync
sender = wsync.DistributedWeightSyncScheme(shared_memory=False, inline_bytes=0, timeout=30.0)
sender.init_on_sender("policy", model=nn.Linear(64, 64), num_workers=1)
worker = pickle.loads(pickle.dumps(sender))
worker.init_on_receiver("policy", model=nn.Linear(64, 64), worker_idx=0)
joining = threading.Thread(target=worker.connect)
joining.start()
sender.connect()
joining.join()
sender.send()
if os.fork() == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
worker.shutdown()
sender.shutdown()
"""


@pytest.mark.slow
def test_9_a_child_that_exits_in_order_does_not_hang_in_a_group(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        try:
            assert program.communicate(timeout=60)[0] == "7\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


EXITING = """
import pickle, sys, torch.nn as nn, wsync
worker = pickle.loads(bytes.fromhex(sys.argv[1]))
worker.init_on_receiver("policy", model=nn.Linear(64, 64), worker_idx=int(sys.argv[2]))
worker.connect()
while worker.receive() is not None:
    pass
"""


@pytest.mark.slow
def test_2_a_process_that_ends_while_its_group_is_destroyed_is_not_aborted() -> None:
    with wsync.DistributedWeightSyncScheme(shared_memory=False, inline_bytes=0, timeout=60.0) as sender:
        sender.init_on_sender("policy", model=nn.Linear(64, 64), num_workers=4)
        command = [sys.executable, "-c", EXITING, pickle.dumps(sender).hex()]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        workers = [subprocess.Popen([*command, str(worker)], env=environment) for worker in range(4)]
        sender.connect(processes=workers)
    assert [worker.wait(60.0) for worker in workers] == [0] * 4


# --- 59.10: what the machine refuses ---


def test_10_open_files_are_counted_before_workers_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 100
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        with wsync.SharedMemWeightSyncScheme(timeout=0.1) as sender:
            sender.init_on_sender("policy", model=model_of(1), num_workers=200)
            with pytest.raises(wsync.SyncTimeout):  # there are no workers
                sender.connect()
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= limit + 700
            monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
            with pytest.raises(wsync.NotConnected, match=f"200 workers need .* may have {limit}"):
                sender.connect()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate", "eventfd"])
def test_10_a_call_that_the_machine_blocks_is_named(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: Any, **__: Any) -> int:
        raise OSError(38, "Function not implemented")

    with wsync.SharedMemWeightSyncScheme(timeout=5.0) as sender, monkeypatch.context() as patch:
        patch.setattr(os, call, blocked)
        with pytest.raises(wsync.WeightSyncError, match=call.removeprefix("posix_")):
            sender.init_on_sender("policy", model=model_of(1), num_workers=1)
            with make_worker(sender, 0) as worker:
                connect(sender.connect, worker)


# --- 57.1: methods enter the gate ---


class Agent(nn.Module):
    """As CleanRL's: no ``forward``, and an actor and a critic that one method calls."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def get_action_and_value(self, x: torch.Tensor) -> tuple[float, float]:
        """The first weight of each part, as the outputs have them."""
        return self.actor(x)[0].item(), self.critic(x)[0].item()


def pass_many(state: WorkerState, passes: int) -> tuple[int, int]:
    """How many passes mixed two versions, and how many versions were seen."""
    agent, x, seen, torn = state.models["policy"], torch.eye(64)[0], set[float](), 0
    for _ in range(passes):
        action, value = agent.get_action_and_value(x)
        torn += action != value
        seen.add(action)
    return torn, len(seen)


def test_1_every_public_method_of_a_model_enters_the_gate(backend: BuiltIn) -> None:
    with backend.connected(2, make=Agent) as session:
        for worker in session.workers:
            worker.start(pass_many, 10_000)
        over, sent = threading.Event(), [1]

        def send() -> None:
            while not over.is_set():
                sent[0] += 1
                session.send(sent[0])

        trainer = threading.Thread(target=send)
        trainer.start()
        try:
            for torn, versions in session.workers.results():
                assert torn == 0 and versions > 5
        finally:
            over.set()
            trainer.join()


# --- 59.9, 59.11 ---


def test_9_a_send_inside_the_gate_of_its_own_worker_says_so() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=1.0) as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        with make_worker(sender, 0) as worker:
            connect(sender.connect, worker)
            started = time.monotonic()
            with wsync.gate(), pytest.raises(RuntimeError, match="forward"):
                sender.send(model_of(2))
            assert time.monotonic() - started < 0.5


class Overlapping(nn.Module):
    """A buffer with two rows that overlap by two values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(6).as_strided((2, 4), (2, 1)))

    def forward(self) -> torch.Tensor:
        return self.rows


class Apart(Overlapping):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(2, 4)


def test_11_a_tensor_that_overlaps_itself_is_refused_by_name(backend: BuiltIn) -> None:
    with pytest.raises(wsync.WeightSyncError, match="'rows'"), joined(backend, Apart(), Overlapping, timeout=20.0):
        pass
    with suppress(WorkerError):
        backend.pool.close()
