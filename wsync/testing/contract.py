"""The contract suite of wsync's backends.

Each promise that a backend makes is a test. The author of a backend subclasses ``BackendContract`` in a test file::

    from wsync.testing import BackendContract

    class TestMyBackend(BackendContract):
        def make_scheme(self, **options):
            return MyScheme(**options)

and has pytest run it. Workers are real processes, which receive the pickled scheme: the class of the scheme has to be
importable there. ``BackendHooks`` lists what else can be overridden.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import wsync
import wsync.testing.commands as commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import SHORT, TIMEOUT, BackendHooks, Session
from wsync.testing.models import (
    EveryTensorKind,
    Loader,
    Small,
    TwoReads,
    WithExtraState,
    digest,
    fill,
    make_large,
    named_tensors,
    nudge,
    scramble,
)
from wsync.testing.workers import WorkerError
from wsync.transforms import Cast, Fuse, Rename, Select

STILL_OPEN = "shutdown() has left something of the trainer's end open or running"
PULL: dict[str, Any] = {"initiator": "receiver"}
TO_ENGINE = (
    Fuse({"fused": ["0.weight", "1.weight"]}),
    Select("fused", "0.bias"),
    Rename({"0.bias": "bias"}),
    Cast(torch.bfloat16),
)


def make_trained() -> nn.Module:
    """A trainer's model."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def make_engine() -> dict[str, Tensor]:
    """What a worker has for that: other names, shapes and precision."""
    return in_engine(make_trained())


def in_engine(model: Any) -> dict[str, Tensor]:
    """The weights that the engine has to have."""
    found = {"fused": torch.cat([model[0].weight, model[1].weight]), "bias": model[0].bias}
    return {name: tensor.detach().bfloat16() for name, tensor in found.items()}


# --- what a process has ---


def resources() -> dict[str, Any]:
    """What this process has that a scheme may have made: threads, descriptors, child processes, wsync's mappings.

    Of descriptors the number of each kind (``socket:[]``, a path), without the numbers in its name.
    """
    gc.collect()  # a memory map keeps a descriptor until it is collected
    descriptors = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            descriptors[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{name}"))] += 1
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": descriptors,
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "mappings": sum("wsync" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


def shared_memory_files() -> set[str]:
    """The names in /dev/shm that contain ``wsync``, or this process's id as torch puts it there."""
    names = os.listdir("/dev/shm")  # other programs of the machine, such as Ray, have files there
    return {name for name in names if "wsync" in name or name.startswith(f"torch_{os.getpid()}_")}


# --- commands ---


def structure_of(model: nn.Module) -> tuple[dict[str, tuple[int, ...]], bool]:
    """The strides of every tensor that is not empty; whether the tied weights of an ``EveryTensorKind`` are one."""
    strides = {name: tensor.stride() for name, tensor in named_tensors(model).items() if tensor.numel()}
    return strides, model.get_parameter("embed.weight") is model.get_parameter("decode.weight")


def _structure(state: WorkerState) -> object:
    return structure_of(state.models["policy"])


def _hold_gate(state: WorkerState) -> None:
    """Enter the gate, as a forward does; it takes until ``_leave_gate``."""
    state.kept["gate"] = ExitStack()
    state.kept["gate"].enter_context(wsync.gate())


def _leave_gate(state: WorkerState) -> None:
    state.kept.pop("gate").close()


def _act(state: WorkerState, versions: int) -> None:
    """Forward until this many versions were seen, none of them torn, each newer than the one before."""
    scheme, model, seen = state.schemes["policy"], state.models["policy"], [0.0]
    for count in range(10_000_000):
        if scheme.initiator == "receiver" and count % 5 == 0:
            scheme.pull(TIMEOUT)
        low, high = model().tolist()
        assert low == high, f"torn: weights of the versions {low} and {high} in one forward"
        assert low >= seen[-1], f"version {low} after {seen[-1]}"
        if low > seen[-1]:
            seen.append(low)
        if len(seen) > versions:
            return
    raise AssertionError(f"saw only {seen}")


def _resources_here(state: WorkerState) -> dict[str, Any]:
    commands.reset(state)
    return resources()


def _shut_down_while_receiving(state: WorkerState) -> object:
    """Shut down while another thread waits in ``receive``; return what it returned there."""
    scheme = state.schemes["policy"]
    with ThreadPoolExecutor(1) as executor:
        received = executor.submit(scheme.receive)
        while not received.running():
            os.sched_yield()
        scheme.shutdown()
        return received.result(TIMEOUT)


def _die_in_the_set_up(state: WorkerState, scheme: Any) -> None:
    scheme.create_transport = lambda worker_idx: os.kill(os.getpid(), signal.SIGKILL)
    commands.join(state, scheme, Small, 0, "policy")


def _send_both(actor: Session, critic: Session, value: float) -> None:
    wsync.synchronize({actor.scheme: fill(actor.model, value), critic.scheme: fill(critic.model, -value)})


class BackendContract(BackendHooks):
    """The promises of every backend, as tests. See ``BackendHooks`` for what a backend overrides."""

    # --- what is sent arrives whole, and only at the workers it was sent to ---

    def test_the_first_weights_arrive(self) -> None:
        """With ``connect``, or with the first ``send`` where the backend delivers them so."""
        with self.connected() as session:
            assert session.versions() == [1, 1]
            assert session.outputs() == [1, 1]

    @pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
    def test_every_calling_form_delivers_every_kind_of_tensor(self, strategy: str) -> None:
        """Bit for bit, with strides, ties and extra state, buffers included."""
        with self.connected(make=EveryTensorKind, strategy=strategy) as session:
            scheme, model, other = session.scheme, session.model, scramble(EveryTensorKind(), 2)
            scramble(model, 1)
            scheme.send()
            assert session.digests() == [digest(model)] * 2

            scheme.send(other)
            assert session.digests() == [digest(other)] * 2

            scramble(other, 3)
            scratch = digest(model)["scratch"]
            scheme.send(other.state_dict())  # without the buffer that is not persistent, which is the model's then
            assert session.digests() == [digest(other) | {"scratch": scratch}] * 2

            extra_state = digest(other)["tail._extra_state"]
            scramble(other, 4)
            weights: Any = TensorDict.from_module(other)
            scheme.send(weights.clone())  # without the extra state, which stays
            assert session.digests() == [digest(other) | {"tail._extra_state": extra_state}] * 2

            scheme.send(scheme.strategy.extract_weights(other))
            assert session.digests() == [digest(other)] * 2
            assert session.workers.call(_structure) == [structure_of(model)] * 2

    def test_worker_ids_select_workers(self) -> None:
        with self.connected(3) as session:
            session.send(2, worker_ids=1)
            assert session.outputs() == [1, 2, 1]
            session.send(3, worker_ids=[0, 2])
            assert session.outputs() == [3, 2, 3] and session.versions() == [3, 2, 3]
            report = session.send(4)
            assert report is not None and dict(report.workers) == {0: 4, 1: 4, 2: 4}
            assert session.outputs() == [4, 4, 4]

    def test_weights_can_differ_between_workers(self) -> None:
        live = {0: fill(Small(), 1), 1: fill(Small(), 2)}
        with self.connected(init={"params_map": live}) as session:
            assert session.outputs() == [1, 2]
            for value in range(3, 6):
                session.scheme.send({0: fill(Small(), value), 1: fill(Small(), -value).state_dict()})
                assert session.outputs() == [value, -value]
            for worker_idx, model in live.items():
                fill(model, 7 + worker_idx)
            session.scheme.send(worker_ids=1)
            assert session.outputs() == [5, 8]
            session.scheme.send()
            assert session.outputs() == [7, 8]

    def test_training_does_not_reach_workers_before_a_send(self) -> None:
        with self.connected() as session:
            before = session.digests()
            nudge(session.model)
            assert session.digests() == before
            session.scheme.send()
            assert session.digests() == [digest(session.model)] * 2
            assert not session.model.weight.is_shared()

    # --- one update after the other ---

    def test_after_a_send_every_forward_uses_the_new_version(self) -> None:
        with self.connected() as session:
            before = session.scheme.metrics.updates
            for version in range(2, 40):
                report = session.send(version)
                assert report is not None and report.version == session.scheme.version == version
                if self.acknowledged:  # installed, although no forward has run
                    assert session.workers.call(commands.plain_digest) == [digest(session.model)] * 2
                assert session.outputs() == [version, version]
            assert session.versions() == [39, 39]
            assert session.scheme.metrics.updates == before + 38

    def test_an_update_that_arrives_in_a_forward_is_installed_when_that_ends(self) -> None:
        """Although no other forward follows."""
        with self.connected(1) as session:
            for value in range(2, 12):
                session.workers.call(_hold_gate)
                session.post(value)
                assert session.workers.call(commands.plain_digest) != [digest(session.model)]
                session.workers.call(_leave_gate)
                session.scheme.wait_async()
                assert session.workers.call(commands.plain_digest) == [digest(session.model)]

    @pytest.mark.parametrize("sync", [True, False])
    def test_a_send_that_does_not_wait_copies_the_weights(self, sync: bool) -> None:
        """It ends although a worker is stopped."""
        with self.connected(sync=sync) as session:
            send = session.post if sync else session.send
            assert session.scheme.wait_async() is None  # no update is under way
            for last in (19, 39):  # the first one may take another path than the next
                session.workers[1].stop()
                for value in range(last - 9, last + 1):
                    assert send(value) is None
                fill(session.model, -1)
                session.workers[1].resume()
                session.scheme.wait_async()
                assert session.workers.call(commands.plain_digest) == [digest(fill(session.model, last))] * 2
                assert session.outputs() == [last, last]
            send(40, worker_ids=0)
            send(41, worker_ids=1)
            session.scheme.wait_async()
            assert session.outputs() == [40, 41]

    @pytest.mark.parametrize("options", [{}, PULL, {**PULL, "max_staleness": 0}], ids=str)
    def test_no_forward_is_torn_while_the_trainer_sends(self, options: dict[str, Any]) -> None:
        with self.connected(make=TwoReads, **options) as session, ThreadPoolExecutor(1) as executor:
            acting, value = executor.submit(session.workers.call, _act, 40), 1
            while not acting.done():
                session.send(value := value + 1)
            acting.result()

    # --- a fault ends in an error that names the worker and the cause, and the other workers go on ---

    def test_a_killed_worker_is_named_and_a_successor_joins_with_the_newest_version(self) -> None:
        with self.connected(3) as session:
            session.workers[1].kill()
            with pytest.raises(wsync.WorkerDied, match="worker 1") as died:
                session.update(2)
            assert set(died.value.workers) == {1} and died.value.version == 2
            assert session.outputs() == [2, 2]
            for value in (3, 4):
                report = session.send(value)
                assert report is not None and set(report.workers) == {0, 2}
                assert session.outputs() == [value, value]
            with pytest.raises(wsync.WorkerDied, match="1"):
                session.send(5, worker_ids=1)
            assert session.restart(1) == session.scheme.version == 4
            assert session.outputs() == [4, 4, 4]
            session.send(5)
            assert session.outputs() == [5, 5, 5] and session.versions() == [5, 5, 5]

    @pytest.mark.parametrize("make", [Small, make_large])
    def test_a_death_wakes_a_send_that_waits(self, make: Callable[[], Small]) -> None:
        with self.connected(make=make) as session:
            session.workers[1].stop()
            killer = threading.Timer(0.1, session.workers[1].kill)
            killer.start()
            with pytest.raises(wsync.WorkerDied, match="worker 1"):
                session.update(2)
            killer.join()  # it waits on a descriptor, whose number the next process may have
            assert session.outputs() == [2]
            session.send(3)
            assert session.outputs() == [3]

    def test_a_worker_that_shuts_down_is_named(self) -> None:
        with self.connected() as session:
            assert session.workers[1].call(commands.shutdown) == []
            with pytest.raises(wsync.WorkerDied, match="worker 1"):
                session.update(2)
            session.send(3)
            assert session.workers[0].call(commands.output)[0] == 3
            assert session.workers[1].call(commands.output)[0] in (1, 2)  # weights of its own

    def test_a_stopped_worker_times_out_and_catches_up_later(self) -> None:
        with self.connected() as session:
            for value in (2, 6):
                session.workers[1].stop()
                session.scheme.timeout = SHORT
                with pytest.raises(wsync.SyncTimeout, match="worker 1") as late:
                    session.send(value) if self.acknowledged else session.update(value)
                assert set(late.value.workers) == {1}
                assert session.workers[0].call(commands.output)[0] == value
                session.post(value + 1)
                session.scheme.timeout = TIMEOUT
                session.post(value + 2)
                session.workers[1].resume()
                session.scheme.wait_async()
                assert session.outputs() == [value + 2] * 2
                session.send(value + 3)
                assert session.outputs() == [value + 3] * 2

    def test_a_worker_that_does_not_connect_is_named(self) -> None:
        with self.workers(1) as workers, self.make_scheme(timeout=self.connects_within) as scheme:
            scheme.init_on_sender("policy", model=Small(), num_workers=2)
            workers[0].start(commands.join, scheme, Small, 0, "policy")
            with pytest.raises(wsync.SyncTimeout, match="1") as late:
                scheme.connect()
            assert set(late.value.workers) == {1}

    def test_an_apply_that_raises_leaves_the_model_as_it_was(self) -> None:
        with self.connected(make=WithExtraState) as session:
            before = session.digests()
            session.model.state = "refuse 1"
            for value in (2, 3):
                with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 1.*ArithmeticError") as failed:
                    session.update(value)
                assert set(failed.value.workers) == {1} and failed.value.version == value
                assert session.digests()[1] == before[1]
                assert session.outputs() == [value, 1] and session.versions() == [value, 1]
            session.model.state = "accepted"
            for value in (4, 5):
                session.send(value)
                assert session.outputs() == [value, value]

    def test_a_damaged_update_is_refused(self) -> None:
        with self.connected() as session:
            session.update(2)
            for worker in session.workers:
                worker.stop()
            session.post(3)
            self.corrupt(session)
            for worker in session.workers:
                worker.resume()
            with pytest.raises(wsync.WorkerFailed, match="corrupt") as failed:
                session.scheme.wait_async()
            assert 1 in failed.value.workers
            assert session.outputs() == [2 if index in failed.value.workers else 3 for index in range(2)]
            session.update(4)
            assert session.outputs() == [4, 4]

    def test_an_update_without_room_changes_nothing(self) -> None:
        with self.connected(make=make_large) as session:
            session.send(2, worker_ids=0)
            with self.starve(session), pytest.raises(wsync.WeightSyncError):
                session.update(3)
            assert session.outputs() == [2, 1]
            session.update(4)
            assert session.outputs() == [4, 4]

    # --- several models at once: every worker gets all of them, or none gets any ---

    def test_both_models_arrive_together(self) -> None:
        with self.connected(model_id="actor") as actor, self.join(actor.workers, model_id="critic") as critic:
            for value in range(2, 12):
                _send_both(actor, critic, value)
                assert actor.outputs() == [value, value] and critic.outputs() == [-value, -value]
            wsync.synchronize({one.scheme: fill(one.model, 50) for one in (actor, critic)}, worker_ids=0)
            assert actor.outputs() == [50, 11] and critic.outputs() == [50, -11]
            actor.send(60)
            critic.send(61)
            assert actor.outputs() == [60, 60] and critic.outputs() == [61, 61]

    def test_a_model_that_one_worker_refuses_is_installed_nowhere_nor_is_the_other(self) -> None:
        with (
            self.connected(make=WithExtraState, model_id="actor") as actor,
            self.join(actor.workers, WithExtraState, "critic") as critic,
        ):
            before = actor.digests(), critic.digests()
            critic.model.state = "refuse 1"
            with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 1.*ArithmeticError"):
                _send_both(actor, critic, 2)
            assert (actor.digests(), critic.digests()) == before
            critic.model.state = "accepted"
            _send_both(actor, critic, 3)
            assert actor.outputs() == [3, 3] and critic.outputs() == [-3, -3]

    @pytest.mark.parametrize("dies", [True, False])
    def test_a_worker_that_cannot_prepare_aborts_the_update(self, dies: bool) -> None:
        """A death fails one transaction only; a worker that was stopped is there for the next one."""
        with self.connected(model_id="actor") as actor, self.join(actor.workers, model_id="critic") as critic:
            worker = actor.workers[1]
            worker.kill() if dies else worker.stop()
            actor.scheme.timeout = critic.scheme.timeout = TIMEOUT if dies else SHORT
            with pytest.raises(wsync.WorkerDied if dies else wsync.SyncTimeout, match=r"'actor': (?s:.)*worker 1"):
                _send_both(actor, critic, 2)
            actor.scheme.timeout = critic.scheme.timeout = TIMEOUT
            if not dies:
                worker.resume()
            assert {1} == {abs(output) for output in actor.outputs() + critic.outputs()}
            for value in (3, 4):
                _send_both(actor, critic, value)
                assert {value} == {abs(output) for output in actor.outputs() + critic.outputs()}

    # --- workers that fetch ---

    def test_a_worker_installs_the_newest_version_when_it_pulls(self) -> None:
        """``send`` waits for no worker; a version that was not pulled is skipped; a replacement pulls, too."""
        with self.connected(**PULL) as session:
            for value in (2, 3, 4):
                report = session.send(value)
                assert report is not None and report.version == value
                assert session.outputs() == [1, 1]
            assert session.workers[0].call(commands.pull) == 4
            assert session.outputs() == [4, 1]
            session.send(5)
            for _ in range(2):  # the second time there is no newer one
                assert session.workers.call(commands.pull) == [5, 5]
            session.workers[1].kill()
            assert session.workers[0].call(commands.pull) == 5  # the sender has read all messages, the death's too
            with pytest.raises(wsync.WorkerDied, match="worker 1"):
                session.send(6)
            version = session.scheme.version
            assert session.restart(1) == version
            session.send(7)
            assert session.outputs() == [5, 6]
            assert session.workers.call(commands.pull) == [version + 1] * 2

    def test_a_worker_that_is_too_far_behind_fetches_before_its_next_forward(self) -> None:
        with self.connected(**PULL, max_staleness=2) as session:
            for value in (2, 3):
                session.send(value)
            assert session.outputs() == [1, 1]
            session.send(4)
            for _ in range(10_000):
                if (outputs := session.outputs()) == [4, 4]:
                    break
                assert {1, 4}.issuperset(outputs)
            session.send(5)
            assert session.outputs() == [4, 4]

    # --- ends that differ ---

    @pytest.mark.parametrize(
        ("end", "receiver"),
        [("send_transform", make_engine), ("receive_transform", make_engine), ("send_transform", Loader)],
    )
    def test_a_model_of_other_names_shapes_and_precision(self, end: str, receiver: Callable[[], Any]) -> None:
        """Transformed at either end, an engine (or what it loads) has the values of a reference, version by version."""
        with self.connected(1, make_trained, receiver=receiver, **{end: TO_ENGINE}) as session:
            whole = sum(parameter.nbytes for parameter in session.model.parameters())
            for _ in range(3):
                nudge(session.model)
                report = session.scheme.send()
                assert session.digests() == [digest(in_engine(session.model))]
                assert end == "receive_transform" or (report is not None and report.bytes < 0.6 * whole)

    # --- a scheme takes away what it has made ---

    def trainer_resources(self) -> dict[str, Any]:
        """``resources`` of the trainer's process; a backend with libraries that come and go leaves theirs out."""
        return resources()

    def _leaves_nothing(self, attempt: Callable[[], object], rounds: int = 3) -> None:
        """Check what further attempts leave: libraries keep what they have made in the first one."""
        attempt()
        before, files = self.trainer_resources(), shared_memory_files()
        for _ in range(rounds):
            attempt()
        after = self.trainer_resources()
        for name in ("children", "descriptors"):  # the pool starts workers when it needs them
            assert after.pop(name, Counter()) <= before.pop(name, Counter()), STILL_OPEN
        assert after == before, STILL_OPEN
        assert shared_memory_files() <= files

    def test_nothing_is_left_after_shutdown(self) -> None:
        in_workers = list[Any]()

        def attempt() -> None:
            with self.make_scheme() as unconnected:
                unconnected.init_on_sender("policy", model=Small(), num_workers=2)
            with self.connected() as session:
                for value in (2, 3):
                    session.send(value)
                    assert session.outputs() == [value, value]
                assert session.workers.call(commands.shutdown) == [[], []]
                session.scheme.shutdown()
                session.scheme.shutdown()
                in_workers.append(sorted(map(str, session.workers.call(_resources_here))))

        self._leaves_nothing(attempt)
        assert in_workers[-1] == in_workers[1]

    def test_a_scheme_that_is_dropped_without_shutdown_leaves_nothing(self) -> None:
        def attempt() -> None:
            with self.workers(2) as workers:
                scheme = self.make_scheme(timeout=TIMEOUT)
                scheme.init_on_sender("policy", model=Small(), num_workers=2)
                for index, worker in enumerate(workers):
                    worker.start(commands.join, scheme, Small, index, "policy")
                scheme.connect()
                scheme.send(fill(Small(), 2))
                workers.results()
                assert workers.call(commands.output) == [[2.0] * 4] * 2
                del scheme
                gc.collect()
                assert workers.call(commands.shutdown) == [[], []]

        self._leaves_nothing(attempt)

    def test_nothing_is_left_of_killed_workers(self) -> None:
        def attempt() -> None:
            with self.connected() as session:
                session.workers[0].kill()
                session.restart(0)
                session.send(2)
                assert session.outputs() == [2, 2]
                session.workers[1].kill()

        self._leaves_nothing(attempt, rounds=1)

    def test_the_end_of_the_sender_ends_a_receive(self) -> None:
        with self.connected(1) as session:
            session.send(3)
            worker = session.workers[0]
            worker.start(commands.receive, None)
            session.scheme.shutdown()
            while worker.result() is not None:  # what was sent before may come first
                worker.start(commands.receive, None)
            with pytest.raises(WorkerError) as again:
                worker.call(commands.receive, None)
            assert "NotConnected" in again.value.kinds
            assert worker.call(commands.shutdown) == []
            assert session.outputs() == [3]  # in memory of its own

    def test_shutdown_ends_a_receive_that_waits(self) -> None:
        with self.connected(1) as session:
            assert session.workers[0].call(_shut_down_while_receiving) is None

    # --- `close` ends the calls of a `TransportBackend`; in shared memory there is none, and the tests pass ---

    def test_close_ends_a_transfer_to_a_worker_that_does_not_read(self) -> None:
        before = commands.wsync_threads()
        with self.connected(1, make_large) as session:
            session.scheme.timeout = SHORT
            session.workers[0].stop()
            with pytest.raises(wsync.WeightSyncError):
                session.update(2)  # at the deadline ``close`` is called, if ``send_weights`` still waits
            session.scheme.shutdown()
            for thread in commands.wsync_threads() - before:
                thread.join(TIMEOUT)
                assert not thread.is_alive(), "send_weights does not end when close() is called"

    def test_close_ends_a_set_up_that_waits_for_a_worker(self) -> None:
        before = commands.wsync_threads()
        with self.workers(1) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=Small(), num_workers=1)
            workers[0].start(_die_in_the_set_up, scheme)
            with suppress(wsync.WeightSyncError):  # in shared memory nothing is set up
                scheme.connect()
            scheme.shutdown()
            for thread in commands.wsync_threads() - before:
                thread.join(TIMEOUT)
                assert not thread.is_alive(), "the set-up does not end when close() is called"
