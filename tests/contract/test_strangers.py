"""What strangers hit in ``wsync``: one test for each point of issues 57 and 59, by the input that they gave."""

import ipaddress
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from asgi_server import serve
from backends import BuiltIn, SharedMemoryPublished, needs_arena
from programs import run_python
from tensordict import TensorDict
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from workers_here import both_ends, in_process, make_worker, model_of

import wsync
from wsync.control import ChannelListener, connect_channel
from wsync.testing import Worker, WorkerPool, commands
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


def make_linear() -> nn.Module:
    return nn.Linear(2, 1)


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


# --- 57.6 to 57.8, 57.17 ---


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
@pytest.mark.parametrize("outer", [torch.compile, nn.DataParallel, lambda model: torch.compile(nn.DataParallel(model))])
def test_7_the_names_of_wrappers_are_stripped_at_any_depth_on_both_ends(outer: Any, wrapped: bool) -> None:
    def net(*, wrap: bool) -> nn.Module:
        parts = nn.Sequential(nn.ReLU(), nn.DataParallel(torch.compile(nn.Linear(2, 2))))  # type: ignore
        return outer(parts) if wrap else nn.Sequential(nn.ReLU(), nn.Linear(2, 2))

    source, model = net(wrap=wrapped), net(wrap=not wrapped)
    with in_process(model, fill(source, 3)) as scheme:
        for value, weights in ((3.0, None), (4.0, source), (5.0, net(wrap=wrapped))):
            scheme.send(weights if weights is None else fill(weights, value))
            assert {parameter.unique().item() for parameter in model.parameters()} == {value}


def low(norm: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.LayerNorm(2) if norm else nn.Identity())


@pytest.mark.parametrize(
    ("source", "model", "remedy"),
    [
        (nn.ModuleDict({"body": nn.Linear(2, 2)}), nn.ModuleDict({"trunk": nn.Linear(2, 2)}), "Rename"),
        (nn.ModuleDict({"body": nn.Linear(2, 2)}), nn.ModuleDict({"trunk": nn.Linear(3, 4)}), ""),
        (low(norm=True).float(), low(norm=True), "Cast('bfloat16', only=['0.weight', '0.bias'])"),
        (low(norm=False).float(), low(norm=False), "Cast('bfloat16')"),
    ],
)
def test_7_a_remedy_is_proposed_that_loses_no_parameter_and_helps(source: Any, model: Any, remedy: str) -> None:
    with wsync.SharedMemWeightSyncScheme() as scheme, pytest.raises(wsync.LayoutMismatch) as refused:
        scheme.init_in_process("policy", model, source)
    proposed = str(refused.value).partition("(send_transform=wsync.transforms.")[2]
    assert proposed.startswith(remedy) and bool(proposed) is bool(remedy)


def test_8_a_guard_goes_with_its_scheme() -> None:
    def load(pairs: Any) -> None:
        next(iter(pairs))
        raise ArithmeticError("no memory")

    with pytest.raises(wsync.WeightSyncError), both_ends(model_of(1), load=load):
        pass
    model = nn.Linear(2, 2)
    with wsync.gate(), wsync.SharedMemWeightSyncScheme():
        pass
    with in_process(model, fill(nn.Linear(2, 2), 2)):
        assert model(torch.ones(2)).tolist() == [6.0, 6.0]


def test_17_a_numpy_state_dict_is_taken_or_the_error_says_how() -> None:
    model, arrays = nn.Linear(2, 2), {"weight": torch.ones(2, 2).numpy(), "bias": torch.ones(2).numpy()}
    with in_process(model) as scheme:
        try:
            scheme.send(arrays)
        except (TypeError, ValueError, wsync.WeightSyncError) as error:
            assert "torch.from_numpy" in str(error)
        else:
            assert model.weight.unique().tolist() == [1.0]


# --- 59.3, 59.4: statements that nobody made ---


class Noting:
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
            worker = stack.enter_context(wsync.DistributedWeightSyncScheme(timeout=1.0 if run == "two" else 20.0))
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


# --- 59.9, 59.10: calls in the wrong place, and what the machine refuses ---


def test_9_a_shutdown_from_another_thread_ends_a_send_that_waits(backend: BuiltIn) -> None:
    with backend.connected(1, timeout=30.0) as session:
        session.workers[0].stop()
        threading.Timer(0.3, session.scheme.shutdown).start()
        started = time.monotonic()
        try:
            with pytest.raises(wsync.WeightSyncError):
                session.update(2)
            assert time.monotonic() - started < 10.0
        finally:
            session.workers[0].resume()


FORKING = """
import os, signal, sys, threading, pickle, torch.nn as nn, wsync
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
    signal.alarm(60)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
worker.shutdown()
sender.shutdown()
"""


@pytest.mark.slow
def test_9_a_child_that_exits_in_order_does_not_hang_in_a_group(tmp_path: Path) -> None:
    assert run_python("-c", FORKING, folder=tmp_path, PYTHONPATH=str(ROOT)).stdout == "7\n"


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


@needs_arena
@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate", "eventfd"])
def test_10_a_call_that_the_machine_blocks_is_named(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: Any, **__: Any) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, call, blocked)
    with pytest.raises(wsync.WeightSyncError, match=call.removeprefix("posix_")), both_ends(model_of(1)):
        pass


# --- 57.1: methods enter the gate; 57.5, 57.15 ---


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
        with ThreadPoolExecutor(1) as executor:
            acting, value = executor.submit(session.workers.call, pass_many, 10_000), 1
            while not acting.done():
                session.send(value := value + 1)
        assert all(torn == 0 and versions > 5 for torn, versions in acting.result())


class Parts(nn.Module):
    """Calls ``on_call`` in each of its ways to be called."""

    def __init__(self, on_call: Callable[[], object]) -> None:
        super().__init__()
        self.on_call, self.layer = on_call, nn.Linear(2, 1)
        self.inner = nn.Sequential(nn.Sequential(nn.Identity()))
        self.inner[0].register_forward_pre_hook(lambda *_: on_call())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        self.on_call()
        return x

    def value(self) -> None:
        self.on_call()


@pytest.mark.parametrize(
    ("gate", "entering"),
    [(True, "call forward act value inner part"), (False, ""), (["act"], "call forward act inner part")],
)
def test_1_parts_enter_the_gate_and_what_enters_can_be_chosen(gate: Any, entering: str) -> None:
    model: Any = Parts(lambda: sender.send())  # raises inside the gate of a worker of this process
    with both_ends(Parts(print), model=model, timeout=1.0, gate=gate) as (sender, _):
        x, inner = torch.ones(2), model.inner
        ways = {"call": partial(model, x), "forward": partial(model.forward, x), "act": partial(model.act, x)}
        parts = {"inner": partial(inner, x), "part": partial(inner[0], x)}
        entered = list[str]()
        for name, call in {**ways, "value": model.value, **parts}.items():
            try:
                call()
            except RuntimeError as error:
                assert "gate" in str(error)
                entered.append(name)
        assert " ".join(entered) == entering
    assert type(model) is Parts and "Parts" in repr(model)
    model.on_call = bool
    assert "_compiled_call_impl" not in vars(model.inner) and model(torch.ones(1)).item() == 1


def test_1_a_model_that_is_compiled_without_graph_breaks_stays_so() -> None:
    model = torch.compile(nn.Sequential(nn.Sequential(nn.Linear(2, 1))), backend="eager", fullgraph=True)
    with in_process(model, source := nn.Sequential(nn.Sequential(model_of(1)))) as scheme:
        for value in (1, 2):
            scheme.send(fill(source, value))
            assert model(torch.ones(2)).tolist() == [3.0 * value]


def test_a_worker_with_a_torchscript_module_is_told_what_to_do() -> None:
    with wsync.SharedMemWeightSyncScheme() as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        worker = make_worker(sender, 0, model=torch.jit.script(model_of(1)))
        with pytest.raises(TypeError, match="synchronise the module that it was made from"):
            worker.connect()


def test_a_worker_that_stays_in_its_gate_is_told_from_one_that_is_silent() -> None:
    with both_ends(model_of(1)) as (sender, _):
        inside, leave = threading.Event(), threading.Event()
        holder = threading.Thread(target=wsync.gated(lambda: (inside.set(), leave.wait(10.0))))
        holder.start()
        inside.wait()
        sender.timeout = 0.2
        with pytest.raises(wsync.SyncTimeout, match=r"it has the update, and is in a forward pass or wsync.gate\(\)"):
            sender.send(model_of(2))
        leave.set()
        holder.join()


def test_1_a_method_that_was_taken_before_it_could_be_gated_is_warned_of() -> None:
    model = Parts(print)
    compiled = torch.compile(model.act, backend="eager")
    with pytest.warns(UserWarning, match=r"Parts\.act was taken"), both_ends(Parts(print), model=model):
        assert callable(compiled)


def never_calls_its_model(state: WorkerState) -> list[str]:
    scheme = state.schemes["policy"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheme.shutdown()
    return [str(one.message) for one in caught if "not called through the gate" in str(one.message)]


def test_1_a_model_that_is_never_called_through_the_gate_is_warned_of() -> None:
    pool = SharedMemoryPublished.pool = WorkerPool()  # its processes have called no model yet
    with ExitStack() as stack:
        stack.callback(pool.close)
        scheme, (idle, acting) = stack.enter_context(joined(SharedMemoryPublished(), model_of(1), make_linear, 2))
        scheme.send(model_of(2))
        acting.call(act)
        assert len(idle.call(never_calls_its_model)) == 1 and not acting.call(never_calls_its_model)


def export_while_pending(state: WorkerState) -> list[float]:
    model: Any = state.models["policy"]
    torch.export.export(model, (torch.ones(2),))
    return model(torch.ones(2)).tolist()


def test_5_an_update_is_not_installed_inside_a_foreign_mode(backend: BuiltIn) -> None:
    source = fill(nn.Linear(2, 2), 1)
    with joined(backend, source, partial(nn.Linear, 2, 2)) as (scheme, (worker,)):
        scheme.send(fill(source, 2))
        assert worker.call(export_while_pending) == [6.0, 6.0]
        scheme.send(fill(source, 3))
        assert worker.call(act) == [9.0, 9.0]


def test_15_both_ends_may_connect_on_first_use() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=20.0) as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        sender.connect(wait=False)
        with make_worker(sender, 0) as worker:
            worker.connect(wait=False)
            sender.send(model_of(2))
            assert worker.model(torch.ones(2)).item() == 6


# --- 59.8, 59.9, 59.11 ---


def receive_under_signals(state: WorkerState, last: int) -> int:
    """Receive until version ``last``, while a handler raises every two milliseconds inside the library; how often."""
    struck, scheme, library = 0, state.schemes["policy"], str(Path(wsync.__file__).parent)

    def strike(_: int, frame: FrameType | None) -> None:
        nonlocal struck
        if frame is not None and library in frame.f_code.co_filename:
            struck += 1
            raise TimeoutError("struck")

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    finished = False
    while not finished:
        with suppress(TimeoutError, wsync.WeightSyncError):
            finished = scheme.version >= last and struck >= 10
            scheme.receive(0.1)
            with wsync.gate():
                pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    return struck


def test_8_an_answer_that_a_signal_swallowed_is_made_up_for(backend: BuiltIn) -> None:
    try:
        with backend.connected(1, timeout=10.0) as session:
            session.workers[0].start(receive_under_signals, 500)
            for value in range(2, 601):
                try:
                    session.update(value)
                except wsync.WorkerFailed as error:  # struck while it was installed, which the trainer is told
                    assert "struck" in str(error)
            assert session.workers[0].result() > 0 and session.outputs() == [600]
    finally:  # no test after this one gets a worker that signals have struck
        with suppress(multiprocessing.ProcessError):
            backend.pool.close()


def test_9_a_send_inside_the_gate_of_its_own_worker_says_so() -> None:
    with both_ends(model_of(1), timeout=1.0) as (sender, _):
        started = time.monotonic()
        with wsync.gate(), pytest.raises(RuntimeError, match="forward"):
            sender.send(model_of(2))
        assert time.monotonic() - started < 0.5


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows: torch.Tensor
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
    with suppress(multiprocessing.ProcessError):
        backend.pool.close()


# --- 57.18, 57.20, 57.22: what the reference documents have ---


def test_18_the_transport_of_shared_memory_is_one_object_with_the_registered_buffers() -> None:
    weights, (ours, _) = TensorDict({"weight": torch.ones(2)}), multiprocessing.Pipe()
    with wsync.SharedMemWeightSyncScheme({"policy": weights}) as scheme:
        transport: Any = scheme.create_transport(None)
        assert scheme.create_transport(SimpleNamespace(pipes=[ours])) is transport
        assert scheme.create_transport(ours) is transport
        assert [one["weight"].tolist() for one in transport.unique_weights] == [[1.0, 1.0]]


def test_18_a_transport_of_a_pickled_scheme_delivers_into_the_model_that_it_is_given() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=20.0) as sender:
        sender.init_on_sender("policy", num_workers=1)  # the first `send` defines the weights
        worker, model = pickle.loads(pickle.dumps(sender)), nn.Linear(2, 2)
        sending = threading.Thread(target=lambda: sender.create_transport(None).send_weights(fill(nn.Linear(2, 2), 3)))
        sending.start()
        worker.create_transport(0).setup_connection_and_weights_on_receiver(worker_idx=0, model=model)
        sending.join()
        assert model(torch.ones(2)).tolist() == [9.0, 9.0]
        worker.shutdown()


def test_18_weights_and_answers_through_a_pipe() -> None:
    (ours, theirs), model = multiprocessing.Pipe(), nn.Linear(2, 2)
    worker = wsync.MPTransport(theirs, timeout=20.0)
    setting_up = threading.Thread(target=lambda: worker.setup_connection_and_weights_on_receiver(model=model))
    setting_up.start()
    wsync.MPTransport(ours, timeout=20.0).send_weights(fill(nn.Linear(2, 2), 3))
    assert model(torch.ones(2)).tolist() == [9.0, 9.0]
    setting_up.join()
    with pytest.raises(wsync.SyncTimeout):
        wsync.MPTransport(ours, timeout=0.01).send_weights(nn.Linear(2, 2))


def test_18_a_worker_registers_its_model_and_its_pipe() -> None:
    (ours, theirs), model = multiprocessing.Pipe(), nn.Linear(2, 2)
    with wsync.MultiProcessWeightSyncScheme("state_dict") as trainer, wsync.MultiProcessWeightSyncScheme() as worker:
        sender, receiver = trainer.create_sender(), worker.create_receiver()
        sender.register_worker(worker_idx=0, pipe_or_context=ours)
        receiver.register_model(model)
        joining = threading.Thread(target=receiver.register_worker_transport, args=(theirs,))
        joining.start()
        sender.update_weights(fill(nn.Linear(2, 2), 3).state_dict())
        joining.join()
        assert receiver.receive(timeout=20.0) and model(torch.ones(2)).tolist() == [9.0, 9.0]


def test_20_the_newest_pages_order_and_what_exists_before_init() -> None:
    scheme = wsync.SharedMemWeightSyncScheme("state_dict", False)  # type: ignore
    assert (scheme.strategy.extract_as, scheme.sync) == ("state_dict", False)
    assert wsync.SharedMemWeightSyncScheme("tensordict").sync
    with pytest.raises(RuntimeError, match="init_on_sender"):
        wsync.NoWeightSyncScheme().get_sender()


def test_22_a_host_may_be_a_link_local_address_with_its_scope() -> None:
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    local = [(ipaddress.IPv6Address(bytes.fromhex(one[0])), one[5]) for one in lines if one[3] == "20"]
    if not local:
        pytest.skip("no interface has a link-local address")
    listener = ChannelListener("test", host="{}%{}".format(*local[0]))
    try:
        channel = connect_channel(replace(listener.address, unix=""), "test", 3, time.monotonic() + 20)
        accepted = listener.accept(time.monotonic() + 20)
        assert accepted is not None and accepted[1].worker == 3
        for one in (channel, accepted[0]):
            one.close()
    finally:
        listener.close()
