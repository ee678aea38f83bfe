"""The protocol under a simulated clock and network: one seed is one history, and a seed is a bug report.

    python -m wsync.testing.simulation 2000            seeds 0 to 1999; a violation prints its seed
    python -m wsync.testing.simulation --trace 17      one history, step by step

It runs the code of the product: the outlet to workers with its sessions (``wsync.workers``, ``wsync.control.session``),
both ends of each connection (``wsync.control.wire``, ``wsync.inbox``), the receivers and the gate of each worker.
Simulated are a loop with a clock that jumps to the next timer, streams that delay, split and cut, workers that die,
stop, hold their gate, or refuse, and a trainer that sends. All runs in one thread: of calls that block, the parts run.
The arena, other media and handshakes have tests with real processes.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from wsync import deadlines, receiver, workers
from wsync.control import session
from wsync.control.auth import Hello
from wsync.control.session import Medium, SessionInbox
from wsync.control.wire import Link
from wsync.deadlines import deadline_in
from wsync.errors import LayoutMismatch, NotConnected, SyncTimeout, WorkerFailed, error_of, last_line
from wsync.gate import Gate, process_gate
from wsync.inbox import WorkerConnection
from wsync.receiver import Receiver
from wsync.update import Cause, Stage, Update
from wsync.weights.layout import Layout, packed
from wsync.weights.targets import Target, load_extra
from wsync.weights.tensors import digest_of
from wsync.workers import Workers

MODELS, INDICES, TIMEOUT, KEEPALIVE = ("actor", "critic"), (0, 1, 2), 5.0, 2.0
KEYS = (b"t" * 32, b"w" * 32)
CAPACITY, SIZE = 300, 24  # bytes of a connection, and of the weights
LAYOUT = packed({"weight": torch.zeros(SIZE, dtype=torch.uint8)})[0]


# --- the loop, the clock, the network ---


class VirtualLoop(asyncio.BaseEventLoop):
    """Nothing is waited for: the clock jumps to the next timer."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        while not self._ready:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            if not timer._cancelled:
                self.now = max(self.now, timer._when)
                self._ready.append(timer)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle._cancelled:
                handle._run()

    def remove_reader(self, fd: Any) -> bool:
        return False

    def _write_to_self(self) -> None: ...


class Stream:
    """In place of a ``SocketStream``: bytes come late and in pieces, in order; cut, it loses them from any byte on."""

    host = ""

    def __init__(self, process: Process, peer: Stream | None = None) -> None:
        self.process, self.world = process, process.world
        self.peer: Stream = peer or self
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
            size = self.world.random.choice([len(data), self.world.random.randint(1, len(data))])
            self._later(self.peer._arrive, data[:size])
            data = data[size:]
        while self.in_flight > CAPACITY:
            await self._change()

    async def read(self, size: int) -> bytes:
        while len(self.received) < size:
            await self._change()
        if self.world.random.random() < 0.2:
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


NUMBERS = itertools.count()  # of the simulated processes: all are in one, and have one list of receivers
GATE: ContextVar[Gate] = ContextVar("GATE")  # of the simulated process
CONTROL: Any = SimpleNamespace(inherited=False, acquire=lambda: CONTROL, release=lambda: None)  # as ``ControlLoop``
CONTROL.post = lambda function, *args, **more: asyncio.get_running_loop().call_soon(partial(function, *args, **more))
CONTROL.call = lambda coroutine, deadline=None: asyncio.ensure_future(coroutine)  # there is no thread that could wait


def make_outlet(*, on_request: bool) -> Workers:
    """An outlet as the product has it."""
    listener: Any = SimpleNamespace(start=lambda welcome: None, close=lambda: None)
    return Workers(listener, len(INDICES), lambda index: Medium(), arena=False, on_request=on_request, loop=CONTROL)


async def welcome(outlet: Workers, index: int, there: Any) -> None:
    """Have the outlet accept a worker, by the trainer's end of its connection."""
    if outlet._closed:
        return there.close()
    link = Link(there, "trainer", KEYS)
    contact: Any = SimpleNamespace(hello=Hello("weights", "policy", index), pid=0, where="")
    contact.accept, contact.link = lambda: asyncio.sleep(0), lambda: asyncio.sleep(0, link)
    contact.refuse = lambda why: asyncio.sleep(0, there.close())
    with suppress(ConnectionError):
        await outlet._welcome(contact)
    check_end(link)


def check_end(link: Link) -> None:
    """A connection ends because an end has closed it, or does not answer; not by what an end has said."""
    usual = "closed|keep-alive|shut down|disconnected|does not fit|cancelled|taken|None"
    assert re.search(usual, str(link.cause)), link.cause


class Model(Target):
    """One model in one worker: its receiver, and what takes the weights. It refuses some, and takes what it accepts."""

    module, extra_of = None, staticmethod(load_extra)

    def __init__(self, worker: Process, name: str) -> None:
        self.worker, self.name, self.world, self.outlet = worker, name, worker.world, worker.world.outlets[name]
        self.model = {"weight": torch.zeros(SIZE, dtype=torch.uint8)}
        self.seen = self.promised = 0
        self.history = [(0.0, 0)]  # when which version was installed
        self.accepted, self.refused = set[int](), set[int]()  # over the present connection
        self.fits, self.misfit_at = False, -1.0  # whether it has accepted a layout, and when it has refused one
        this: Any = self
        self.receiver = Receiver(name, this, this, gate=False)
        self.connection = WorkerConnection(this, None, name, self.receiver, lambda _: Medium(), binds_arena=False)
        self.receiver.connection = self.connection

    @property
    def version(self) -> int:
        """That of the bytes which the model has."""
        return self.world.known[self.name, self.model["weight"].numpy().tobytes()]

    def had(self, since: float) -> set[int]:
        """Return the versions that it had since then."""
        return {v for at, v in self.history if at >= since} | {max(v for at, v in self.history if at <= since)}

    def target(self, layout: Layout, *, bind: bool) -> Target:
        if self.world.random.random() < self.world.refused:
            self.world.say("misfit", worker=self.worker.index, model=self.name)
            self.misfit_at = self.world.loop.time()
            raise LayoutMismatch("the model does not fit")
        self.fits, self.accepted, self.refused = True, set(), set()
        return self

    def check_only(self, views: Sequence[Tensor], extra: Any = None) -> None:
        version = self.world.known[self.name, views[0].numpy().tobytes()]
        if version in self.refused:
            self.world.fail(None, {"message": f"{self.name} {version} is tried again after it was refused"})
        if version not in self.accepted and self.world.random.random() < self.world.refused:
            self.world.say("refuse", worker=self.worker.index, model=self.name, version=version)
            self.refused.add(version)
            self.worker.withdraw()
            raise LayoutMismatch("refused")
        self.accepted.add(version)

    def install(self, views: Sequence[Tensor], extra: Any = None) -> None:
        self.check_only(views)
        self.model["weight"].copy_(views[0])
        self.history.append((self.world.loop.time(), self.version))


class Process:
    """Tasks that are killed together, and may be stopped. A worker has an index and models; the trainer has none."""

    def __init__(self, world: World, index: int = 0, models: Sequence[str] = ()) -> None:
        self.world, self.tasks, self.streams, self.alive = world, list[asyncio.Task[Any]](), list[Stream](), True
        self.running = asyncio.Event()
        self.running.set()
        self.withdrawn_at, self.number = 0.0, next(NUMBERS)
        self.index, self.gate, self.context = index, Gate(), copy_context()
        self.context.run(GATE.set, self.gate)
        self.models = {name: Model(self, name) for name in models}
        for name in models:
            for task in (self.stay_connected(name), self.fetch(name), self.fetch(name)):
                self.start(task)
        if models:
            self.start(self.act())

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.note(self.world.loop.create_task(coroutine, context=self.context))

    def note(self, task: asyncio.Task[Any]) -> None:
        task.add_done_callback(self.world.task_ended)
        self.tasks.append(task)

    def withdraw(self) -> None:
        """What was ready may lack what it requires of another model from now on; or it is refused."""
        self.withdrawn_at = self.world.loop.time()
        for model in self.models.values():
            model.promised = 0

    async def step(self, seconds: float = 0.001) -> None:
        """Between any two steps others may run, and this process may be stopped."""
        await asyncio.sleep(self.world.random.expovariate(1 / seconds))
        await self.running.wait()

    def kill(self) -> None:
        self.alive = False
        for task in self.tasks:
            task.cancel()
        for stream in self.streams:
            stream.close()

    @property
    def versions(self) -> dict[str, int]:
        return {name: model.version for name, model in self.models.items()}

    async def inside(self, model: Model, function: Callable[..., object], *args: Any) -> None:
        """Call ``function`` as a thread does that waits for the gate."""
        assert not (error := await model.receiver.inside(function, *args)), error

    async def stay_connected(self, name: str) -> None:
        """Connect, and connect again whenever the connection has ended: as ``Receiver.connect`` does it."""
        model, contact = self.models[name], SimpleNamespace(hello=Hello("weights", name, self.index), pid=0)
        receiver = model.receiver
        while True:
            await self.inside(model, receiver._open, self.number)
            here: Any = Stream(self)
            here.peer = there = Stream(self.world.trainer, peer=here)
            self.world.trainer.start(welcome(self.world.outlets[name], self.index, there))
            link = Link(here, "worker", (KEYS[1], KEYS[0]))
            try:
                settings: Any = await link.receive()
                await model.connection._begin(CONTROL, link, settings, contact)  # type: ignore[arg-type]
                self.withdraw()
                running: Any = model.connection._running
                self.note(running)
                await self.inside(model, self.gate.attach, receiver)
                await running
            except LayoutMismatch:
                here.close()
                await asyncio.sleep(1)
                excused = max(self.world.faulty[self.index] + 1, self.world.met) >= model.misfit_at
                named = self.index in model.outlet._rejected or model.outlet._closed or excused
                assert named, f"worker {self.index} was not rejected, although {name} does not fit"
            except ConnectionError:
                here.close()
            check_end(link)
            await asyncio.sleep(0.1)

    async def act(self) -> None:
        """Run forwards, each with the gate held."""
        world = self.world
        while True:
            await self.step(world.random.choice([0.0001, 0.3]))
            with self.gate.hold():
                world.check_forward(self)
                before = self.versions
                await self.step(world.random.choice([0.0001, 0.01, 0.3]))
                assert self.versions == before, f"worker {self.index}: an update was installed during a forward"

    async def fetch(self, name: str) -> None:
        """Fetch now and then, as ``Receiver.pull`` does it."""
        model = self.models[name]
        while self.world.on_request:
            await self.step(1)
            inbox, newest = model.receiver.inbox, model.outlet._newest[self.index]
            if newest is not None and isinstance(inbox, SessionInbox):
                self.note(request := self.world.loop.create_task(inbox.request()))
                model.receiver._pulling += 1
                await asyncio.wait([request], timeout=self.world.random.choice([0.1, TIMEOUT]))
                await self.inside(model, bool)
                model.receiver._pulling -= 1
                has, ended = max(model.version, *model.refused, 0), inbox._ended
                self.world.say("fetch", worker=self.index, model=model.name, version=has)
                assert has >= newest.version or ended or not request.done(), f"{newest} was not fetched: {has}"
                await self.step(1)
                assert request.done() or not ended, "a fetch goes on after the end of its connection"

    def break_connection(self, way: str) -> None:
        """``close`` or ``cut`` a connection, if there is one."""
        if found := [stream for stream in self.streams if not stream.error]:
            self.world.fault(way, self, KEEPALIVE)
            getattr(self.world.random.choice(found), way)()


class World:
    """One history: three workers, two models, a trainer, and faults, all drawn from one seed."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.random, self.tracing = random.Random(seed), trace
        self.loop = VirtualLoop()
        self.latency = 10 ** self.random.uniform(-4, -1)
        self.rate = 10 ** self.random.uniform(-1, 1)  # of faults, per second
        self.refused = 0.05  # of the updates and layouts that a model looks at
        self.failures = list[BaseException]()
        self.order = list[Any]()  # what happened
        self.committed, self.aborted = list[dict[str, int]](), list[dict[str, int]]()
        self.known = {(name, bytes(SIZE)): 0 for name in MODELS}  # the version of these bytes
        self.digests = {(name, 0): {"weight": digest_of(torch.zeros(SIZE, dtype=torch.uint8))} for name in MODELS}
        self.met = 0.0  # when the last call of ``readmit`` began
        self.kept = list[Any]()  # what was sent and not waited for
        self.on_request = self.random.random() < 0.2  # whether workers fetch
        self.versions = dict.fromkeys(MODELS, 0)
        self.requires: dict[str, dict[str, int]] = {name: {} for name in MODELS}
        self.outlets: dict[str, Workers] = {}
        self.faulty = dict.fromkeys(INDICES, 0.0)  # until when a worker has had a fault
        self.workers: dict[int, Process] = {}

    def say(self, what: str, **more: Any) -> None:
        self.order.append((what, *more.values()))
        if self.tracing:
            print(f"{self.loop.time():8.4f} {what}", *(f"{key}={value}" for key, value in more.items()))

    def fault(self, what: str, worker: Process, seconds: float) -> None:
        self.say(what, worker=worker.index, seconds=seconds)
        self.faulty[worker.index] = max(self.faulty[worker.index], self.loop.time() + seconds)

    async def faults(self) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(self.rate))
            worker = self.workers[self.random.choice(INDICES)]
            match self.random.choice(["kill", "stop", "cut", "close", "disconnect"]):
                case "kill":
                    self.fault("kill", worker, 2)
                    worker.kill()
                    await asyncio.sleep(self.random.uniform(0, 2))
                    self.workers[worker.index] = Process(self, worker.index, MODELS)
                case "stop":
                    self.fault("stop", worker, seconds := self.random.choice([0.01, 1, 2 * TIMEOUT]))
                    worker.running.clear()
                    await asyncio.sleep(seconds)
                    worker.running.set()
                case "disconnect":
                    self.fault("disconnect", worker, KEEPALIVE)
                    self.outlets[self.random.choice(MODELS)].disconnect(worker.index, "it was disconnected")
                case way:
                    worker.break_connection(way)

    # --- what must hold ---

    def check_forward(self, worker: Process) -> None:
        where, versions = f"worker {worker.index}:", worker.versions
        for name, model in worker.models.items():
            version = versions[name]
            assert version >= model.seen, f"{where} {name} went back from {model.seen} to {version}"
            assert version >= model.promised, f"{where} {name} {model.promised} was promised, {version} acts"
            model.seen = version
        for parts in self.committed if all(versions.values()) else ():
            sides = {versions[name] >= version for name, version in parts.items()}
            assert len(sides) == 1, f"{where} {versions} mixes the two sides of {parts}"
        for parts in self.aborted:
            assert versions.items().isdisjoint(parts.items()), f"{where} {versions} has an aborted part"

    async def in_time(self, name: str, call: Any, timeout: float = TIMEOUT) -> dict[int, Cause]:
        """Return what a call says of workers. It ends in time; at once if none has a fault or lacks what is needed."""
        began, causes = self.loop.time(), await call
        took = self.loop.time() - began
        late = [index for index, cause in causes.items() if cause.kind == "late"]
        assert took < timeout or (late and took <= timeout + 1e-6), f"a call took {took} s"
        for index in late if timeout == TIMEOUT and not self.on_request else ():
            has = {model.outlet.name: model.receiver.version for model in self.workers[index].models.values()}
            newest = self.outlets[name]._newest[index]
            lacks = newest is not None and any(has[sender] < one for sender, one in newest.requires.items())
            assert lacks or self.faulty[index] > began - 1, f"worker {index} had no fault, and has not answered"
        return causes

    # --- the trainer ---

    def new_update(self, name: str, *, undecided: bool = False) -> Update:
        self.versions[name] += 1
        data, buffer, version = self.random.randbytes(SIZE), self.outlets[name].reserve(None), self.versions[name]
        weight = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.known[name, data], self.digests[name, version] = version, {"weight": digest_of(weight)}
        buffer.pack([weight])
        return Update(version, buffer, requires=self.requires[name], undecided=undecided)

    async def wait(self, name: str, version: int, stage: Stage) -> dict[int, Cause]:
        """Wait for an update, as the product does; and again for those that have died or have refused it."""
        sessions = {index: member.session for index, member in self.outlets[name]._given[version].items()}
        causes = await self.in_time(name, workers.wait_for(sessions, version, stage, deadline_in(TIMEOUT)))
        known = {index: cause for index, cause in causes.items() if cause.kind != "late"}
        ended, rest = self.loop.time(), {index: sessions[index] for index in known}
        assert await workers.wait_for(rest, version, stage, deadline_in(TIMEOUT)) == known
        assert self.loop.time() == ended, "a second wait ends at once"
        return causes

    async def define(self, name: str) -> bool:
        """Define the layout, if there is none yet and it fits all workers: as ``Sender`` does it."""
        outlet, began, causes = self.outlets[name], self.loop.time(), dict[int, Cause]()
        if outlet._layout is not None:
            return True
        if outlet.workers and self.random.random() < 0.7:
            models = {index: self.workers[index].models[name] for index in outlet.workers}
            causes = await self.in_time(name, outlet.check_layout(LAYOUT, deadline_in(TIMEOUT)))
            for index, model in models.items():
                kind = causes[index].kind if index in causes else ""
                right = model.misfit_at >= began if kind == "failed" else kind or model.fits
                assert right, f"worker {index} has said of {name}: {causes.get(index)}"
        self.say("layout", model=name, causes=sorted(causes))
        if not causes:
            outlet.set_layout(LAYOUT)
            await asyncio.sleep(0)
        return not causes

    async def send(self, name: str) -> None:
        """Send an update of one model, and wait until it is ready or installed; or do not wait."""
        update = self.new_update(name)
        version = update.version
        self.outlets[name].publish(update, INDICES)
        await asyncio.sleep(0)
        stage: Stage = "installed" if self.on_request else self.random.choice(["ready", "installed"])
        given = {
            index: (member, model := self.workers[index].models[name], model.refused)
            for index, member in self.outlets[name]._given[version].items()
        }
        self.kept.append((name, version, stage, given, self.loop.time()))
        if self.on_request or self.random.random() < 0.3:
            self.say("send_async", model=name, version=version)
        else:
            await self.finish(*self.kept.pop())

    async def wait_async(self, _: str) -> None:
        """Wait for what was sent and not waited for."""
        while self.kept:
            await self.finish(*self.kept.pop(0))

    async def finish(self, name: str, version: int, stage: Stage, given: Any, began: float) -> None:
        """Wait for an update; what that says of a worker is true."""
        causes = await self.wait(name, version, stage)
        self.say("send", model=name, version=version, until=stage, causes=sorted(causes))
        for index, (member, model, refused) in given.items():
            if self.outlets[name]._given[version][index] is not member or model.refused is not refused:
                continue  # it has connected again
            where, has = f"send {name} {version}: worker {index}", model.version
            if index not in causes:
                assert stage == "ready" or has >= version, f"{where} has {has}"
                if stage == "installed" or model.worker.withdrawn_at < began:
                    model.promised = max(model.promised, version)
            elif causes[index].kind == "failed":
                assert version not in model.had(began), f"{where} is said to have refused it, and had it"
                assert max(refused, default=0) >= version, f"{where}: {causes[index]}"
                refused.add(version)  # also one that a refused one had replaced

    async def verify(self, name: str) -> None:
        """Ask all workers whether they have a version; the answer is true of some moment of the call."""
        outlet, version = self.outlets[name], max(0, self.versions[name] - self.random.choice([0, 0, 1]))
        models = {index: self.workers[index].models[name] for index in outlet.workers}
        timeout, began = self.random.choice([0.1, TIMEOUT]), self.loop.time()
        asked = outlet.verify(dict.fromkeys(models, self.digests[name, version]), deadline_in(timeout))
        causes = await self.in_time(name, asked, timeout)
        self.say("verify", model=name, version=version, causes=sorted(causes))
        for index, model in models.items():
            kind, had = causes[index].kind if index in causes else "", model.had(began)
            right = {"": version in had, "failed": had != {version}, "late": index in outlet.workers}.get(kind, True)
            assert right, f"verify {name} {version}: worker {index} had {had}, and said {causes.get(index)}"

    async def readmit(self, name: str) -> None:
        """Wait until a worker is connected, perhaps another one: as ``Workers.readmit`` does it."""
        outlet, index, began = self.outlets[name], self.random.choice(INDICES), self.loop.time()
        member = outlet._members.get(index)
        self.met = began
        if member is not None and not member.fresh:
            self.fault("replace", self.workers[index], KEEPALIVE)
            await outlet._end(member, "it was disconnected")
        try:
            await outlet._meet([index], {}, deadline_in(TIMEOUT))
        except (SyncTimeout, WorkerFailed, NotConnected) as error:
            misfit = self.workers[index].models[name].misfit_at >= began - 1
            assert misfit or outlet._closed or self.faulty[index] > began, error
        assert self.loop.time() <= began + TIMEOUT + 1e-6
        self.say("readmit", worker=index, model=name)

    async def transaction(self, _: str) -> None:
        """Both models in all workers, or none: as ``wsync.transaction`` does it."""
        updates = {name: self.new_update(name, undecided=True) for name in MODELS}
        parts = {name: update.version for name, update in updates.items()}
        requires = {self.outlets[name].name: version for name, version in parts.items()}
        if self.random.random() < 0.3:  # a connection ends about when a decision is on its way
            delay = self.latency * self.random.uniform(0, 8)
            self.loop.call_later(delay, lambda: self.workers[self.random.choice(INDICES)].break_connection("close"))
        for name, update in updates.items():
            update.requires = self.requires[name] | requires
            self.outlets[name].prepare(update, INDICES)
        await asyncio.sleep(0)
        refused = False
        for name, version in parts.items():
            refused = refused or bool(await self.wait(name, version, "received"))
        (self.aborted if refused else self.committed).append(parts)
        for name, update in updates.items():
            if refused:
                self.outlets[name].abort(update.version)
            else:
                update.undecided = False
                self.requires[name] = dict(update.requires)
                self.outlets[name].announce_commit(update, INDICES)
        for name, update in () if refused else updates.items():
            self.outlets[name].commit(update, INDICES)
        self.say("abort" if refused else "commit", parts=parts)
        await asyncio.sleep(0)
        if not refused and self.random.random() < 0.7:
            for name, version in parts.items():
                await self.wait(name, version, "installed")

    async def history(self) -> None:
        self.main: Any = asyncio.current_task()
        self.loop.set_exception_handler(self.fail)
        self.trainer = Process(self)
        self.outlets = {name: make_outlet(on_request=self.on_request) for name in MODELS}
        for name, outlet in self.outlets.items() if self.random.random() < 0.7 else ():
            outlet.set_layout(LAYOUT)
            outlet.publish(self.new_update(name), INDICES)
        for index in INDICES:
            self.workers[index] = Process(self, index, MODELS)
        await asyncio.sleep(1)
        faults = asyncio.ensure_future(self.faults())
        for _ in range(self.random.randint(3, 16)):
            await asyncio.sleep(self.random.choice([0, 0, 0.01, 1]))
            name = self.random.choice(MODELS)
            if all([await self.define(one) for one in MODELS]):
                calls = [self.send, self.wait_async, self.verify, self.readmit, self.transaction]
                await self.random.choices(calls, [8, 4, 4, 2, 0 if self.on_request else 8])[0](name)
        if self.random.random() < 0.2:
            return await self.close(self.random.choice(MODELS), faults)
        faults.cancel()
        await self.recover()

    async def close(self, name: str, faults: asyncio.Task[None]) -> None:
        """The trainer shuts down while another thread's call waits: all ends, at both ends."""
        calls = [self.define] if self.outlets[name]._layout is None else [self.send, self.verify, self.readmit]
        call = self.random.choice(calls)
        waiting = asyncio.ensure_future(call(name))
        await asyncio.sleep(self.random.choice([0, self.latency, 1]))
        for outlet in self.outlets.values():
            began, outlet._closed = self.loop.time(), True
            await outlet._close(self.random.random() < 0.5)
            assert self.loop.time() - began <= 10 + 1e-6, "it waits five seconds for workers, and five for its own end"
        await asyncio.wait([waiting], timeout=0.1)
        assert waiting.done(), "a call goes on after the end"
        waiting.result()
        faults.cancel()
        for worker in self.workers.values():
            worker.running.set()
        await asyncio.sleep(2 * KEEPALIVE)
        connections = [model.connection for worker in self.workers.values() for model in worker.models.values()]
        left = [*self.trainer.tasks, *(one._running for one in connections if one._running is not None)]
        assert all(task.done() for task in left), left
        self.say("shutdown", during=call.__name__)

    async def recover(self) -> None:
        """The faults have stopped: a while later every worker has the newest, without another send."""
        self.refused = 0.0
        for index, worker in self.workers.items():
            worker.running.set()
            if not worker.alive:
                self.workers[index] = Process(self, index, MODELS)
            elif any(model.refused for model in worker.models.values()):  # its user has mended the model
                for stream in worker.streams:
                    stream.close()
        latest = self.loop.time() + 4 * KEEPALIVE + 2 * TIMEOUT
        while (missing := self.missing()) and self.loop.time() < latest:
            await asyncio.sleep(0.1)
        assert not missing, missing

    def missing(self) -> str:
        """Return what a worker lacks of the newest versions, or that it is not connected."""
        for name, outlet in self.outlets.items():
            if list(outlet.workers) != list(INDICES):
                return f"{name}: only workers {list(outlet.workers)} are present at the end"
            for index, newest in enumerate(outlet._newest):
                has = self.workers[index].versions[name]
                if newest is not None and newest.version != has:
                    return f"worker {index} stays at {name} {has}, the newest is {newest}"
        return ""

    def run(self) -> None:
        """Run the history; raise what does not hold."""
        deadlines.time = SimpleNamespace(monotonic=self.loop.time)  # pyright: ignore[reportAttributeAccessIssue]
        session.process_gate = receiver.process_gate = GATE.get
        receiver.error_of = lambda *called: last_line(error_of(*called))  # a traceback has this machine's paths
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self.history())
        except asyncio.CancelledError:
            raise self.failures[0] from None
        finally:
            deadlines.time = time
            session.process_gate, receiver.process_gate, receiver.error_of = process_gate, process_gate, error_of
            receiver._receivers.clear()

    def fail(self, _: object, context: dict[str, Any]) -> None:
        """Handle an exception of a task or a callback: end the history when it happens."""
        self.failures.append(context.get("exception") or RuntimeError(context["message"]))
        self.main.cancel()

    def task_ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(self.loop, {"exception": error})


# --- many histories ---


def simulate(first: int, count: int) -> tuple[Counter[str], set[int], list[tuple[int, BaseException]]]:
    """Run the histories of ``count`` seeds; return their events, the hashes of their orders, and the violations."""
    events, orders, bad = Counter[str](), set[int](), list[tuple[int, BaseException]]()
    for seed in range(first, first + count):
        try:
            world = World(seed)
            world.run()
            events.update(what for what, *_ in world.order)
            orders.add(hash(str(world.order)))
        except Exception as violation:  # noqa: BLE001  whatever went wrong is reported with its seed
            bad.append((seed, violation))
    return events, orders, bad


def main(arguments: Sequence[str]) -> int:
    """Run from the command line; return the exit status."""
    match arguments:
        case ["--trace", seed]:
            World(int(seed), trace=True).run()
            return 0
        case [*first, count]:
            start, began = int(first[0]) if first else 0, time.monotonic()
            events, orders, bad = simulate(start, int(count))
            for seed, violation in bad:
                print(f"seed {seed}: {violation!r}")
            took = f"{time.monotonic() - began:.1f} s"
            summary = f"{count} histories from seed {start}, {len(orders)} different, {took}, {len(bad)} violations"
            print(f"{summary}; {dict(events)}")
            return 1 if bad else 0
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
