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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import ProcessError
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import wsync
import wsync.testing.commands as commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import SHORT, TIMEOUT, BackendHooks, Session
from wsync.testing.models import EveryTensorKind, Small, WithExtraState, digest, fill, make_large, nudge, scramble

STILL_OPEN = "something of the trainer's end is still open or running"
PULL: dict[str, Any] = {"initiator": "receiver"}


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


@contextmanager
def _threads_end() -> Iterator[None]:
    """Check that the threads of wsync that the block starts have ended, or end soon."""
    before = commands.wsync_threads()
    yield
    for thread in commands.wsync_threads() - before:
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "a call of the transport does not end when close() is called"


# --- commands ---


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
        if scheme.initiator == "receiver" and scheme.max_staleness is None and count % 5 == 0:
            scheme.pull(TIMEOUT)
        low, high = model(twice=True).tolist()
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

    def test_the_first_weights_arrive_and_training_does_not_before_a_send(self) -> None:
        with self.connected() as session:
            assert session.versions() == [1, 1] and session.outputs() == [1, 1]
            before = session.digests()
            nudge(session.model)
            assert session.digests() == before
            session.scheme.send()
            assert session.digests() == [digest(session.model)] * 2
            assert not session.model.weight.is_shared()

    @pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
    def test_every_calling_form_delivers_every_kind_of_tensor(self, strategy: str) -> None:
        """Bit for bit, with strides, ties and extra state, buffers included."""
        with self.connected(make=EveryTensorKind, strategy=strategy) as session:
            scheme, model, other = session.scheme, session.model, EveryTensorKind()
            scramble(model, 1)
            scheme.send()
            assert session.digests() == [digest(model)] * 2
            forms: list[tuple[Callable[[], Any], str]] = [  # each with the name of what it lacks, which stays
                (other.state_dict, "scratch"),
                (lambda: other, ""),
                (lambda: TensorDict.from_module(other).clone(), "tail._extra_state"),  # pyright: ignore
                (lambda: scheme.strategy.extract_weights(other), ""),
            ]
            for seed, (make, lacking) in enumerate(forms, 2):
                before = session.digests()[0]
                scramble(other, seed)
                scheme.send(make())
                assert session.digests() == [digest(other) | ({lacking: before[lacking]} if lacking else {})] * 2

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

    # --- one update after the other ---

    def test_after_a_send_every_forward_uses_the_new_version(self) -> None:
        with self.connected() as session:
            before = session.scheme.metrics.updates
            for version in range(2, 40):
                report = session.send(version)
                assert report is not None and report.version == session.scheme.version == version
                if session.scheme.acknowledges:  # installed, although no forward has run
                    assert session.digests(in_gate=False) == [digest(session.model)] * 2
                assert session.outputs() == [version, version]
            assert session.versions() == [39, 39]
            assert session.scheme.metrics.updates == before + 38

    def test_an_update_that_arrives_in_a_forward_is_installed_when_that_ends(self) -> None:
        """Although no other forward follows."""
        with self.connected(1) as session:
            for value in range(2, 12):
                session.workers.call(_hold_gate)
                session.post(value)
                assert session.digests(in_gate=False) != [digest(session.model)]
                session.workers.call(_leave_gate)
                session.scheme.wait_async()
                assert session.digests(in_gate=False) == [digest(session.model)]

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
                assert session.digests(in_gate=False) == [digest(fill(session.model, last))] * 2
                assert session.outputs() == [last, last]
            send(40, worker_ids=0)
            send(41, worker_ids=1)
            session.scheme.wait_async()
            assert session.outputs() == [40, 41]

    @pytest.mark.parametrize("options", [{}, PULL, {**PULL, "max_staleness": 0}], ids=str)
    def test_no_forward_is_torn_while_the_trainer_sends(self, options: dict[str, Any]) -> None:
        with self.connected(make=partial(Small, 4096), **options) as session, ThreadPoolExecutor(1) as executor:
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

    def test_a_stopped_worker_times_out_and_catches_up_later(self) -> None:
        with self.connected() as session:
            for value in (2, 6):
                session.workers[1].stop()
                session.scheme.timeout = SHORT
                with pytest.raises(wsync.SyncTimeout, match="worker 1") as late:
                    session.send(value) if session.scheme.acknowledges else session.update(value)
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

    @contextmanager
    def _both(self, make: Callable[[], Small] = Small) -> Iterator[tuple[Session, Session]]:
        """Two models in the same two workers."""
        with self.connected(make=make, model_id="actor") as actor, self.join(actor.workers, make, "critic") as critic:
            yield actor, critic

    def test_both_models_arrive_together(self) -> None:
        with self._both() as (actor, critic):
            for value in range(2, 12):
                _send_both(actor, critic, value)
                assert actor.outputs() == [value, value] and critic.outputs() == [-value, -value]
            wsync.synchronize({one.scheme: fill(one.model, 50) for one in (actor, critic)}, worker_ids=0)
            assert actor.outputs() == [50, 11] and critic.outputs() == [50, -11]
            actor.send(60)
            critic.send(61)
            assert actor.outputs() == [60, 60] and critic.outputs() == [61, 61]

    @pytest.mark.parametrize(
        ("fault", "error"),
        [("refuses", wsync.WorkerFailed), ("dies", wsync.WorkerDied), ("is stopped", wsync.SyncTimeout)],
    )
    def test_neither_model_is_installed_where_one_worker_cannot_prepare(self, fault: str, error: Any) -> None:
        """Nowhere. It fails one transaction only; a worker that was stopped is there for the next one."""
        with self._both(WithExtraState) as (actor, critic):
            worker, before = actor.workers[1], actor.digests()[0]
            match fault:
                case "refuses":
                    critic.model.state = "refuse 1"
                case "dies":
                    worker.kill()
                case _:
                    worker.stop()
                    actor.scheme.timeout = critic.scheme.timeout = SHORT
            with pytest.raises(error, match=r"'(actor|critic)': (?s:.)*worker 1"):
                _send_both(actor, critic, 2)
            critic.model.state = actor.model.state
            actor.scheme.timeout = critic.scheme.timeout = TIMEOUT
            if fault == "is stopped":
                worker.resume()
            assert all(weights == before for weights in actor.digests() + critic.digests())
            for value in (3, 4):
                _send_both(actor, critic, value)
                assert {value} == {abs(output) for output in actor.outputs() + critic.outputs()}

    # --- a scheme takes away what it has made ---

    def trainer_resources(self) -> dict[str, Any]:
        """``resources`` of the trainer's process; a backend with libraries that come and go leaves theirs out."""
        return resources()

    @pytest.mark.parametrize("end", ["shutdown", "dropped", "killed"])
    def test_nothing_is_left(self, end: str) -> None:
        """After ``shutdown`` at both ends, of a scheme that is dropped without it, and of killed workers."""
        in_workers = list[Any]()

        def attempt() -> None:
            with self.make_scheme() as unconnected:
                unconnected.init_on_sender("policy", model=Small(), num_workers=2)
            with self.workers(2) as workers:
                session = self.begin(workers)
                for value in (2, 3):
                    session.send(value)
                    assert session.outputs() == [value, value]
                match end:
                    case "shutdown":
                        assert workers[1].call(commands.shutdown) == []
                        with pytest.raises(wsync.WorkerDied, match="worker 1"):
                            session.update(4)
                        assert workers[0].call(commands.shutdown) == []
                        in_workers.append(sorted(map(str, workers.call(_resources_here))))
                    case "killed":
                        workers[0].kill()
                        session.restart(0)
                        session.send(4)
                        assert session.outputs() == [4, 4]
                        workers[1].kill()
                if end != "dropped":
                    session.scheme.shutdown()
                    session.scheme.shutdown()
                del session
                gc.collect()
                workers.call(commands.shutdown)

        attempt()  # libraries keep what they have made in the first one
        before, files = self.trainer_resources(), shared_memory_files()
        for _ in range(1 if end == "killed" else 3):
            attempt()
        after = self.trainer_resources()
        for name in ("children", "descriptors"):  # the pool starts workers when it needs them
            assert after.pop(name, Counter()) <= before.pop(name, Counter()), STILL_OPEN
        assert after == before, STILL_OPEN
        assert shared_memory_files() <= files
        assert end != "shutdown" or in_workers[-1] == in_workers[1]

    def test_the_end_of_the_sender_ends_a_receive(self) -> None:
        with self.connected(1) as session:
            session.send(3)
            worker = session.workers[0]
            worker.start(commands.receive, None)
            session.scheme.shutdown()
            while worker.result() is not None:  # what was sent before may come first
                worker.start(commands.receive, None)
            with pytest.raises(ProcessError, match="NotConnected"):
                worker.call(commands.receive, None)
            assert worker.call(commands.shutdown) == []
            assert session.outputs() == [3]  # in memory of its own

    def test_shutdown_ends_a_receive_that_waits(self) -> None:
        with self.connected(1) as session:
            assert session.workers[0].call(_shut_down_while_receiving) is None

    # --- `close` ends the calls of a `TransportBackend`; in shared memory there is none, and the tests pass ---

    def test_close_ends_a_transfer_to_a_worker_that_does_not_read(self) -> None:
        with self.workers(1) as workers, _threads_end(), self.join(workers, make_large) as session:
            session.scheme.timeout = SHORT
            workers[0].stop()
            with pytest.raises(wsync.WeightSyncError):
                session.update(2)  # at the deadline ``close`` is called, if ``send_weights`` still waits

    def test_close_ends_a_set_up_that_waits_for_a_worker(self) -> None:
        with self.workers(1) as workers, _threads_end(), self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=Small(), num_workers=1)
            workers[0].start(_die_in_the_set_up, scheme)
            with suppress(wsync.WeightSyncError):  # in shared memory nothing is set up
                scheme.connect()
