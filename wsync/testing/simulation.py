"""The protocol under a simulated clock and network: one seed is one history, and a seed is a bug report.

    python -m wsync.testing.simulation 2000            seeds 0 to 1999; a violation prints its seed
    python -m wsync.testing.simulation --trace 17      one history, step by step
    python -m wsync.testing.simulation --planted 1000  does it find the bugs that are planted?

It runs the code of the product: the outlet to workers with its sessions (``wsync.workers``, ``wsync.control.session``),
both ends of each connection with their frames (``wsync.control.wire``), and the rule for updates that belong together.
What is simulated is around it: a loop whose clock jumps to the next timer, streams that delay, split and cut, workers
that die, stop, or hold their gate, and a trainer that sends. Not simulated: the arena, media other than the connection
itself, and handshakes; those have tests with real processes.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from wsync import deadlines, workers
from wsync.control import session
from wsync.control.session import Medium, SessionInbox, WorkerSession, choose, wait_for
from wsync.control.wire import Link
from wsync.deadlines import deadline_in
from wsync.update import Cause, Update
from wsync.workers import Workers

MODELS, INDICES, TIMEOUT, KEEPALIVE = ("actor", "critic"), (0, 1, 2), 5.0, 2.0
KEYS = (b"t" * 32, b"w" * 32)


class Violation(AssertionError):
    """Something that must hold does not hold."""


# --- the loop, the clock, the network ---


class VirtualTime(selectors.DefaultSelector):
    """Nothing is waited for: the clock jumps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Violation("everything waits, and nothing is going to happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """A loop with a clock of its own."""

    def __init__(self) -> None:
        self._virtual = VirtualTime()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class DirectLoop:
    """What the product calls its control loop: everything runs in the simulated one already."""

    inherited, here = False, True

    def acquire(self) -> DirectLoop:
        return self

    def release(self) -> None:
        """Do nothing."""

    def post(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        asyncio.get_running_loop().call_soon(lambda: function(*args, **kwargs))


class Process:
    """Tasks that are killed together, and may be stopped for a while."""

    def __init__(self, world: World) -> None:
        self.world, self.tasks, self.streams, self.alive = world, list[asyncio.Task[Any]](), list[Stream](), True
        self.running = asyncio.Event()
        self.running.set()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a task of this process."""
        task = asyncio.ensure_future(coroutine)
        task.add_done_callback(self.world.task_ended)
        self.tasks.append(task)

    async def step(self, seconds: float = 0.001) -> None:
        """Between any two steps others may run, and this process may be stopped."""
        await asyncio.sleep(self.world.random.expovariate(1 / seconds))
        await self.running.wait()

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False
        for task in self.tasks:
            task.cancel()
        for stream in self.streams:
            stream.close()


class Stream:
    """One end of a connection. Bytes arrive late and in pieces, in order; a cut one loses them from any byte on."""

    CAPACITY = 300
    host = ""

    def __init__(self, process: Process) -> None:
        self.process, self.world = process, process.world
        self.peer: Stream = self
        self.received, self.in_flight, self.last, self.error = bytearray(), 0, 0.0, ""
        self.changed = asyncio.Event()
        self.lost = False
        process.streams.append(self)

    async def write(self, head: bytes, payload: memoryview | bytes = b"") -> None:
        await self.process.step()
        self._check()
        data = head + bytes(payload)
        self.in_flight += len(data)
        while data:
            size = self.world.random.randint(1, len(data))
            piece, data = data[:size], data[size:]
            self._later(self.peer._arrive, piece)
        while self.in_flight > self.CAPACITY:
            await self._change()

    async def read(self, size: int) -> bytes:
        while len(self.received) < size:
            await self._change()
        await self.process.step()
        data = bytes(self.received[:size])
        del self.received[:size]
        self.peer.in_flight -= size
        self.peer.changed.set()
        return data

    async def read_into(self, memory: memoryview) -> None:
        memory[:] = await self.read(len(memory))

    def close(self) -> None:
        if not self.error:
            self._break("closed at this end")
            if not self.peer.error and not self.lost:
                self._later(self.peer._break, "closed by the other end")

    def cut(self) -> None:
        for end in (self, self.peer):
            end.lost = True
            self.world.loop.call_later(KEEPALIVE, end._break, "keep-alive: the other end does not answer")

    def _later(self, function: Callable[..., None], *args: Any) -> None:
        loop, delay = self.world.loop, self.world.random.expovariate(1 / self.world.latency)
        self.last = max(self.last + 1e-9, loop.time() + delay)  # timers at one time have no order
        loop.call_at(self.last, function, *args)

    def _arrive(self, piece: bytes) -> None:
        if not self.lost:
            self.received += piece
            self.changed.set()

    def _break(self, reason: str) -> None:
        self.error = self.error or reason
        self.changed.set()

    def _check(self) -> None:
        if self.error:
            raise ConnectionError(self.error)

    async def _change(self) -> None:
        self._check()
        self.changed.clear()
        await self.changed.wait()
        await self.process.running.wait()


# --- what the product is given ---


class FakeBuffer:
    """Packed weights without tensors."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.flat, self.layout = SimpleNamespace(is_cpu=True), SimpleNamespace(nbytes=len(data))

    @property
    def memory(self) -> memoryview:
        return memoryview(self.data)


class FakeLayout:
    """A layout of so many bytes."""

    SIZE = 24

    def encode(self) -> bytes:
        return b"layout"


class Visitor:
    """A worker that asks to be accepted."""

    def __init__(self, index: int, there: Stream) -> None:
        self.hello, self.pid = SimpleNamespace(worker=index, native=False), 0
        self._stream = there

    async def accept(self, fds: Sequence[int] = ()) -> Link:
        return Link(self._stream, "trainer", KEYS)

    async def refuse(self, why: str) -> None:
        self._stream.close()

    async def gone(self) -> None:
        await asyncio.Event().wait()


class Model:
    """The receiver of one model in one worker, as its connection and the rule ``choose`` see it."""

    def __init__(self, worker: SimulatedWorker, sender: str) -> None:
        self.worker, self.sender, self.version = worker, sender, 0
        self.installed: Update | None = None
        self.inbox: SessionInbox | None = None

    def candidates(self) -> Sequence[Update]:
        return self.inbox.poll() if self.inbox is not None else ()

    async def use_layout(self, layout: bytes, *, try_only: bool) -> str:
        return ""

    def new_buffer(self) -> FakeBuffer:
        return FakeBuffer(bytes(FakeLayout.SIZE))

    async def check(self, update: Update) -> str:
        await self.worker.step()
        return "refused" if self.worker.world.random.random() < 0.05 else ""

    def settle(self) -> None:
        if not self.worker.gate_held:
            self.worker.install()

    @property
    def passed_version(self) -> int:
        return self.version

    def ready_version(self) -> int:
        chosen = dict[Any, Update](choose(self.worker.models.values())).get(self)
        return self.version if chosen is None else chosen.version

    def ended(self, cause: str, *, finished: bool) -> None:
        """The connection has ended; another one follows."""


class SimulatedWorker(Process):
    """A process with two models, whose loop acts all the time."""

    def __init__(self, world: World, index: int) -> None:
        super().__init__(world)
        self.index, self.gate_held = index, False
        self.models: dict[str, Any] = {name: Model(self, world.outlets[name].name) for name in MODELS}
        self.seen, self.promised = Counter[str](), Counter[str]()  # versions by model
        self.start(self.act())
        for name in MODELS:
            self.start(self.stay_connected(name))

    async def stay_connected(self, name: str) -> None:
        """Connect, and connect again whenever the connection has ended."""
        model = self.models[name]
        while True:
            stream = self.world.dial(self, name)
            link = Link(stream, "worker", (KEYS[1], KEYS[0]))
            try:
                await link.receive()  # its settings
                loop = asyncio.get_running_loop()
                inbox = SessionInbox(link, Medium(), model, loop.call_soon)  # pyright: ignore[reportArgumentType]
                await link.send(session.Fits())
                if model.inbox is not None:  # what was promised stays promised
                    inbox._staged.extend(model.inbox.poll())
                model.inbox = inbox
                await inbox.run()
            except ConnectionError:
                stream.close()
            await asyncio.sleep(0.1)

    def install(self) -> None:
        """Install what is ready, inside the gate."""
        chosen: dict[Any, Update] = {**choose(self.models.values())}
        for model, update in chosen.items():
            model.version, model.installed = update.version, update
            assert model.inbox is not None
            model.inbox.settled(update, "")
            model.inbox.answer(update, "", 0.0, 0.0)

    async def act(self) -> None:
        """Run forwards, each with the gate held; what has arrived is installed on entering, and after leaving."""
        world = self.world
        while True:
            await self.step(world.random.choice([0.0001, 0.3]))
            self.install()
            self.gate_held = True
            world.check_forward(self)
            before = {name: model.version for name, model in self.models.items()}
            await self.step(world.random.choice([0.0001, 0.01, 0.3]))
            if {name: model.version for name, model in self.models.items()} != before:
                raise Violation(f"worker {self.index}: an update was installed during a forward")
            self.gate_held = False
            self.install()


class World:
    """One history: three workers, two models, a trainer, and faults, all drawn from one seed."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed, self.random, self.loop, self.tracing = seed, random.Random(seed), Loop(), trace
        self.latency = 10 ** self.random.uniform(-4, -1)
        self.rate = 10 ** self.random.uniform(-1, 1)  # of faults, per second
        self.events = Counter[str]()
        self.digest = list[Any]()  # the order of what happened
        self.connections = list[Stream]()
        self.committed, self.aborted = list[dict[str, int]](), list[dict[str, int]]()
        self.payloads: dict[tuple[str, int], bytes] = {}
        self.versions = dict.fromkeys(MODELS, 0)
        self.requires: dict[str, dict[str, int]] = {name: {} for name in MODELS}
        self.outlets: dict[str, Workers] = {}
        self.workers: dict[int, SimulatedWorker] = {}

    def say(self, what: str, **more: Any) -> None:
        """Note, and print, a step."""
        self.events[what] += 1
        self.digest.append((what, *more.values()))
        if self.tracing:
            print(f"{self.loop.time():8.4f} {what}", *(f"{key}={value}" for key, value in more.items()))

    # --- its parts ---

    def dial(self, process: Process, name: str) -> Stream:
        """Connect a worker to the outlet of a model; return the worker's end."""
        here, there = Stream(process), Stream(self.trainer)
        here.peer, there.peer = there, here
        self.connections.append(here)
        self.trainer.start(self._welcome(name, Visitor(self._index_of(process), there)))
        return here

    async def _welcome(self, name: str, visitor: Visitor) -> None:
        with suppress(ConnectionError):
            await self.outlets[name]._welcome(visitor)  # pyright: ignore[reportArgumentType]

    def _index_of(self, process: Process) -> int:
        return process.index if isinstance(process, SimulatedWorker) else -1

    async def faults(self) -> None:
        """Break something now and then."""
        while True:
            await asyncio.sleep(self.random.expovariate(self.rate))
            worker = self.random.choice(list(self.workers.values()))
            match self.random.choice(["kill", "stop", "cut", "close"]):
                case "kill":
                    self.say("kill", worker=worker.index)
                    worker.kill()
                    await asyncio.sleep(self.random.uniform(0, 2))
                    self.workers[worker.index] = SimulatedWorker(self, worker.index)
                case "stop":
                    seconds = self.random.choice([0.01, 1, 2 * TIMEOUT])
                    self.say("stop", worker=worker.index, seconds=seconds)
                    worker.running.clear()
                    await asyncio.sleep(seconds)
                    worker.running.set()
                case way:
                    if found := [stream for stream in worker.streams if not stream.error]:
                        self.say(way, worker=worker.index)
                        getattr(self.random.choice(found), way)()

    def close_one(self) -> None:
        """Close a connection: about when a decision is on its way."""
        worker = self.random.choice(list(self.workers.values()))
        if found := [stream for stream in worker.streams if not stream.error]:
            self.say("close", worker=worker.index)
            self.random.choice(found).close()

    # --- what must hold ---

    def check_forward(self, worker: SimulatedWorker) -> None:
        """At the beginning of a forward."""
        versions = {name: model.version for name, model in worker.models.items()}
        for name, model in worker.models.items():
            if model.installed is None:
                continue
            if model.version < worker.seen[name]:
                raise Violation(f"worker {worker.index}: {name} went back from {worker.seen[name]} to {model.version}")
            worker.seen[name] = model.version
            if bytes(model.installed.buffer.memory) != self.payloads[name, model.version]:
                raise Violation(f"worker {worker.index}: {name} {model.version} has the payload of another version")
            if model.version < worker.promised[name]:
                raise Violation(
                    f"worker {worker.index}: {name} {worker.promised[name]} was promised, {model.version} acts"
                )
        if all(versions.values()):
            for parts in self.committed:
                if len({versions[name] >= version for name, version in parts.items()}) > 1:
                    raise Violation(f"worker {worker.index}: {versions} mixes the two sides of {parts}")
        if any(versions[name] == version for parts in self.aborted for name, version in parts.items()):
            raise Violation(f"worker {worker.index}: {versions} has an aborted part")

    def check_named(self, sessions: Mapping[int, WorkerSession], causes: Mapping[int, Cause], began: float) -> None:
        """A call ends in time, and at once where the connection has ended."""
        if self.loop.time() - began > TIMEOUT + 1e-6:
            raise Violation(f"a call took {self.loop.time() - began} s")
        for index, cause in causes.items():
            if cause.kind == "late" and sessions[index].cause is not None:
                raise Violation(f"worker {index}: its connection ended, and the trainer waited for the deadline")

    # --- the trainer ---

    def new_update(self, name: str, *, undecided: bool = False) -> Update:
        """Return the next version of a model."""
        self.versions[name] += 1
        data = self.random.randbytes(FakeLayout.SIZE)
        self.payloads[name, self.versions[name]] = data
        buffer: Any = FakeBuffer(data)
        return Update(self.versions[name], buffer, requires=self.requires[name], undecided=undecided)

    def sessions(self, name: str, version: int) -> dict[int, WorkerSession]:
        """The sessions that a version was given to."""
        return {index: member.session for index, member in self.outlets[name]._given[version].items()}

    async def send(self, name: str) -> None:
        """Send an update of one model, and wait until it is ready or installed; or do not wait."""
        outlet, update = self.outlets[name], self.new_update(name)
        outlet.publish(update, INDICES)
        await asyncio.sleep(0)
        if self.random.random() < 0.3:
            self.say("send_async", model=name, version=update.version)
            return
        stage = self.random.choice(["ready", "installed"])
        sessions, began = self.sessions(name, update.version), self.loop.time()
        holders = {index: self.workers[index] for index in sessions}
        causes = await workers.wait_for(sessions, update.version, stage, deadline_in(TIMEOUT))  # type: ignore[arg-type]
        self.say("send", model=name, version=update.version, until=stage, causes=sorted(causes))
        self.check_named(sessions, causes, began)
        for index in sessions.keys() - causes.keys():
            worker = holders[index]
            if not worker.alive or self.workers[index] is not worker:
                continue
            if stage == "installed" and worker.models[name].version < update.version:
                raise Violation(f"send {name} {update.version}: worker {index} has {worker.models[name].version}")
            worker.promised[name] = max(worker.promised[name], update.version)

    async def transaction(self) -> None:
        """Both models in all workers, or none: as ``wsync.transaction`` does it."""
        updates = {name: self.new_update(name, undecided=True) for name in MODELS}
        parts = {name: update.version for name, update in updates.items()}
        requires = {self.outlets[name].name: version for name, version in parts.items()}
        if self.random.random() < 0.3:
            self.loop.call_later(self.latency * self.random.uniform(0, 8), self.close_one)
        began = self.loop.time()
        for name, update in updates.items():
            update.requires = self.requires[name] | requires
            self.outlets[name].prepare(update, INDICES)
        await asyncio.sleep(0)
        refused = False
        for name, update in updates.items():
            causes = await workers.wait_for(
                self.sessions(name, update.version), update.version, "received", deadline_in(TIMEOUT)
            )
            refused = refused or bool(causes)
            if refused:
                break
        if self.loop.time() - began > 2 * TIMEOUT + 1e-6:
            raise Violation(f"the preparation took {self.loop.time() - began} s")
        if refused:
            for name, update in updates.items():
                self.outlets[name].abort(update.version, INDICES)
            self.aborted.append(parts)
        else:
            self.committed.append(parts)
            for name, update in updates.items():
                update.undecided = False
                self.requires[name] = dict(update.requires)
                self.outlets[name].commit(update, INDICES)
        self.say("abort" if refused else "commit", parts=parts)
        await asyncio.sleep(0)
        if not refused and self.random.random() < 0.7:
            for name, update in updates.items():
                await workers.wait_for(
                    self.sessions(name, update.version), update.version, "installed", deadline_in(TIMEOUT)
                )

    async def history(self) -> None:
        """The whole history."""
        self.trainer = Process(self)
        for name in MODELS:
            listener: Any = SimpleNamespace(start=lambda welcome: None, close=lambda: None)
            outlet = Workers(
                listener,
                len(INDICES),
                lambda index: Medium(),
                arena=False,
                on_request=False,
                loop=DirectLoop(),  # type: ignore[arg-type]
            )
            outlet._layout = FakeLayout()  # type: ignore[assignment]
            self.outlets[name] = outlet
        for name in MODELS:
            self.outlets[name].publish(self.new_update(name), INDICES)
        for index in INDICES:
            self.workers[index] = SimulatedWorker(self, index)
        await asyncio.sleep(1)
        faults = asyncio.ensure_future(self.faults())
        for _ in range(self.random.randint(5, 25)):
            await asyncio.sleep(self.random.choice([0, 0, 0.01, 1]))
            if self.random.random() < 0.4:
                await self.transaction()
            else:
                await self.send(self.random.choice(MODELS))
        faults.cancel()
        await self.recover()

    async def recover(self) -> None:
        """The faults have stopped: a while later every worker has the newest, without another send."""
        for index, worker in self.workers.items():
            worker.running.set()
            if not worker.alive:
                self.workers[index] = SimulatedWorker(self, index)
        await asyncio.sleep(4 * KEEPALIVE + 2 * TIMEOUT)
        for name, outlet in self.outlets.items():
            newest = outlet._newest[0]
            assert newest is not None
            for worker in self.workers.values():
                if worker.models[name].version != newest.version:
                    raise Violation(
                        f"worker {worker.index} stays at {name} {worker.models[name].version}, newest {newest.version}"
                    )
            if list(outlet.workers) != list(INDICES):
                raise Violation(f"{name}: workers {outlet.workers} are present at the end")

    def run(self) -> World:
        """Run the history; raise what does not hold."""
        asyncio.set_event_loop(self.loop)
        deadlines.time = SimpleNamespace(monotonic=self.loop.time)  # pyright: ignore[reportAttributeAccessIssue]
        main, failure = self.loop.create_task(self.history()), list[BaseException]()

        def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            failure.append(context.get("exception") or RuntimeError(context["message"]))
            main.cancel()

        self.loop.set_exception_handler(failed)
        try:
            self.loop.run_until_complete(main)
        except asyncio.CancelledError:
            raise failure[0] from None
        finally:
            self.loop.set_exception_handler(lambda loop, context: None)
            while tasks := asyncio.all_tasks(self.loop):
                for task in tasks:
                    task.cancel()
                self.loop.run_until_complete(asyncio.wait(tasks))
            self.loop.close()
            asyncio.set_event_loop(None)
            deadlines.time = time
        return self

    def task_ended(self, task: asyncio.Task[Any]) -> None:
        """A task's exception ends the history when it happens."""
        if not task.cancelled() and task.exception() is not None:
            self.loop.call_exception_handler({"message": "", "exception": task.exception()})


# --- does it find anything? Each bug is one change, as somebody could make it ---


def _received_taken_for_ready() -> Any:
    original = WorkerSession.state
    return (
        WorkerSession,
        "state",
        lambda self, version, stage: original(self, version, "received" if stage == "ready" else stage),
    )


def _an_abort_that_commits() -> Any:
    original = WorkerSession.decide
    return WorkerSession, "decide", lambda self, version, *, commit: original(self, version, commit=True)


def _the_older_update_wins() -> Any:
    original = WorkerSession.offer

    def offer(self: WorkerSession, update: Update) -> None:
        waiting = list(self._waiting)
        original(self, update)
        if waiting and not update.undecided and self.cause is None:
            self._waiting = session.deque(waiting)

    return WorkerSession, "offer", offer


def _a_death_that_is_not_told() -> Any:
    def end(self: WorkerSession, cause: str) -> None:
        self.cause = cause
        self._link.close(ConnectionError(cause))

    return WorkerSession, "end", end


def _a_commit_before_all_have_prepared() -> Any:
    async def some_are_enough(sessions: Any, version: int, stage: Any, deadline: Any) -> Any:
        causes = await wait_for(sessions, version, stage, deadline)
        return {} if stage == "received" and len(causes) < len(sessions) else causes

    return workers, "wait_for", some_are_enough


def _an_answer_about_another_version() -> Any:
    original = WorkerSession.state
    return WorkerSession, "state", lambda self, version, stage: original(self, version - 1, stage)


def _siblings_that_are_not_awaited() -> Any:
    def choose_all(models: Any) -> Any:
        return {model: found[-1] for model in models if (found := model.candidates())}

    return sys.modules[__name__], "choose", choose_all


def _an_install_during_a_forward() -> Any:
    return Model, "settle", lambda self: self.worker.install()


PLANTED = [
    _received_taken_for_ready,
    _an_abort_that_commits,
    _the_older_update_wins,
    _a_death_that_is_not_told,
    _a_commit_before_all_have_prepared,
    _an_answer_about_another_version,
    _siblings_that_are_not_awaited,
    _an_install_during_a_forward,
]


def hunt(bug: Callable[[], Any], seeds: int) -> tuple[int, BaseException] | None:
    """Plant a bug; return the first seed that finds it, and what it found; None if none does."""
    place, name, changed = bug()
    original = getattr(place, name)
    setattr(place, name, changed)
    try:
        for seed in range(seeds):
            try:
                World(seed).run()
            except Exception as violation:  # noqa: BLE001  whatever it breaks
                return seed, violation
    finally:
        setattr(place, name, original)
    return None


def simulate(first: int, count: int) -> tuple[Counter[str], set[int], list[tuple[int, BaseException]]]:
    """Run the histories of ``count`` seeds; return their events, the digests of their orders, and the violations."""
    events, orders, bad = Counter[str](), set[int](), list[tuple[int, BaseException]]()
    for seed in range(first, first + count):
        try:
            world = World(seed).run()
            events += world.events
            orders.add(hash(tuple(map(str, world.digest))))
        except Exception as violation:  # noqa: BLE001  whatever went wrong is reported with its seed
            bad.append((seed, violation))
    return events, orders, bad


def main(arguments: Sequence[str]) -> int:
    """Run from the command line; return the exit status."""
    if arguments[0] == "--trace":
        World(int(arguments[1]), trace=True).run()
        return 0
    if arguments[0] == "--planted":
        missed = 0
        for bug in PLANTED:
            found = hunt(bug, int(arguments[1]))
            missed += found is None
            print(f"{bug.__name__[1:]:40} {f'seed {found[0]}: {found[1]}' if found else 'NOT FOUND'}", flush=True)
        return 1 if missed else 0
    first, count = (0, int(arguments[0])) if len(arguments) == 1 else (int(arguments[0]), int(arguments[1]))
    began = time.monotonic()
    events, orders, bad = simulate(first, count)
    for seed, violation in bad:
        print(f"seed {seed}: {violation!r}")
    print(
        f"{count} histories from seed {first}, {len(orders)} different, {time.monotonic() - began:.1f} s, "
        f"{len(bad)} violations; {dict(events)}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
