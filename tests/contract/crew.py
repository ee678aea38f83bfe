"""Real workers that do what the test says: processes with a pipe, processes that RPC knows as well, Ray actors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from contract_models import Tail, digest, fill
from stopping import stop
from torch import nn

import wsync

PATIENCE = 60.0  # seconds for an answer on a noisy machine; nothing here needs one


class RemoteError(Exception):
    """What a worker raised."""

    def __init__(self, kinds: list[str], message: str) -> None:
        super().__init__(f"{kinds[0]}: {message}")
        self.kinds = kinds
        self.message = message


class Host:
    """The worker's side: schemes and models by id, and the commands."""

    def __init__(self) -> None:
        self.schemes: dict[str, wsync.WeightSyncScheme] = {}
        self.models: dict[str, nn.Module] = {}
        self.below: Crew | None = None

    def init(self, scheme: wsync.WeightSyncScheme, make: Callable[[], nn.Module], worker: int, model_id: str) -> None:
        torch.set_num_threads(1)
        Tail.worker = worker
        model = make()
        self.schemes[model_id], self.models[model_id] = scheme, model
        scheme.init_on_receiver(model_id, model=model, worker_idx=worker)

    def ready(self) -> None:
        """Be there."""

    def connect(self, model_id: str = "policy") -> int:
        self.schemes[model_id].connect()
        return self.schemes[model_id].version

    def join(self, scheme: wsync.WeightSyncScheme, make: Callable[[], nn.Module], worker: int, model_id: str) -> int:
        self.init(scheme, make, worker, model_id)
        return self.connect(model_id)

    def forward(self, model_id: str = "policy") -> list[float]:
        return self.models[model_id]().tolist()

    def digest(self, model_id: str = "policy") -> dict[str, Any]:
        with wsync.gate():
            return digest(self.models[model_id])

    def raw_digest(self, model_id: str = "policy") -> dict[str, Any]:
        return digest(self.models[model_id])

    def version(self, model_id: str = "policy") -> int:
        with wsync.gate():
            return self.schemes[model_id].version

    def receive(self, timeout: float | None = None, model_id: str = "policy") -> Any:
        weights = self.schemes[model_id].receive(timeout)
        return None if weights is None else (type(weights).__name__, sorted(map(str, weights.keys())))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)

    def shutdown(self) -> list[str]:
        """Twice; then what is left of it."""
        for scheme in self.schemes.values():
            scheme.shutdown()
            scheme.shutdown()
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("wsync")]


def obey(host: Host, method: str, args: Any) -> tuple[bool, Any]:
    """Do it; what came of it."""
    try:
        return True, getattr(host, method)(*args)
    except Exception as error:  # noqa: BLE001  the test judges it
        return False, ([kind.__name__ for kind in type(error).__mro__], str(error))


def serve(pipe: Any, session: Any = None) -> None:
    """A worker's main: commands in, answers out, until the test hangs up."""
    host = Host()
    if session is not None:
        session.join()
    try:
        while True:
            method, args = pipe.recv()
            if method == "bye":  # a forked worker has inherited the other end as well: nobody can hang up on it
                raise EOFError
            pipe.send(obey(host, method, args))
    except (EOFError, ConnectionError):
        host.shutdown()
    if session is not None:
        session.leave()


class Remote:
    """The test's side of one worker."""

    def start(self, method: str, *args: Any) -> None:
        raise NotImplementedError

    def answer(self) -> tuple[bool, Any]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    process: Any
    alive = True

    def result(self) -> Any:
        good, value = self.answer()
        if good:
            return value
        raise RemoteError(*value)

    def call(self, method: str, *args: Any) -> Any:
        self.start(method, *args)
        return self.result()

    def kill(self) -> None:
        self.alive = False
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE)

    def stop(self) -> None:
        """Stop it, and see that it has stopped."""
        stop(self.process.pid)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


class ProcessRemote(Remote):
    """A process with a pipe."""

    def __init__(self, context: Any, session: Any = None) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, session))
        self.process.daemon = False  # it may have workers of its own
        self.process.start()
        theirs.close()

    def start(self, method: str, *args: Any) -> None:
        self.pipe.send((method, args))

    def answer(self) -> tuple[bool, Any]:
        assert self.pipe.poll(PATIENCE), "a worker did not answer"
        return self.pipe.recv()

    def close(self) -> None:
        with suppress(ConnectionError):
            self.start("bye")
        self.pipe.close()
        self.process.join(5.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def establish(scheme: wsync.WeightSyncScheme, **first: Any) -> None:
    """The sender's half of the rendezvous, and of the delivery of the first weights, if there are any."""
    scheme.connect(**first)
    if not scheme.delivers_at_connect and scheme.weights is not None:
        scheme.send()


current_kind = "process"
"""Of the workers that the backend under test has: conftest.py says."""


def kind() -> str:
    """Of workers, that the backend under test has."""
    return current_kind


class Crew:
    """Some workers, and the schemes that they follow."""

    def __init__(self, count: int, method: str = "forkserver", kind: str | None = None) -> None:
        kind = kind or current_kind
        if kind == "ray":
            from ray_crew import hire

            self.workers: list[Remote] = hire(count)
            return
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["collectors.workers.worker"])  # as the collectors do: there is one server
        if kind == "rpc":
            from rpc_crew import invitations

            self.workers = [ProcessRemote(context, invitation) for invitation in invitations(count)]
            for worker in self.workers:
                worker.call("ready")  # a session that is being joined does not survive the death of a member
        else:
            self.workers = [ProcessRemote(context) for _ in range(count)]

    def __getitem__(self, index: int) -> Remote:
        return self.workers[index]

    def __len__(self) -> int:
        return len(self.workers)

    def follow(
        self, scheme: wsync.WeightSyncScheme, make: Callable[[], nn.Module], model_id: str = "policy"
    ) -> list[int]:
        """Connect both ends, with the first weights; the workers' versions."""
        for index, worker in enumerate(self.workers):
            worker.start("join", scheme, make, index, model_id)
        establish(scheme)
        self.results()
        if not scheme.delivers_at_connect and scheme.weights is not None:
            self.all("receive", PATIENCE, model_id)  # seen, as elsewhere after connect
        return self.all("version", model_id)

    def succeed(self, index: int, spare: Crew, scheme: wsync.WeightSyncScheme, make: Callable[[], nn.Module]) -> None:
        """Kill a worker, and have one of ``spare``, or a fresh one, join in its place."""
        self.workers[index].kill()
        self.workers[index].close()
        self.workers[index] = spare.workers.pop() if spare.workers else Crew(1)[0]
        self.workers[index].start("join", scheme, make, index, "policy")
        scheme.readmit(index)
        self.workers[index].result()

    def results(self) -> list[Any]:
        return [worker.result() for worker in self.workers]

    def all(self, method: str, *args: Any) -> list[Any]:
        for worker in self.workers:
            worker.start(method, *args)
        return self.results()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@contextmanager
def crew(count: int, method: str = "forkserver") -> Iterator[Crew]:
    if method == "fork" and current_kind != "process":
        pytest.skip(f"nobody forks {current_kind} workers")
    with session():
        workers = Crew(count, method)
        try:
            yield workers
        finally:
            workers.close()


@contextmanager
def session() -> Iterator[None]:
    """What the trainer has to have for workers of the current kind."""
    if current_kind != "rpc":
        yield
        return
    from rpc_crew import open_session

    with open_session():
        yield


class CascadingHost:
    """A worker's context with workers of its own."""

    def __init__(self, model: nn.Module, scheme: wsync.WeightSyncScheme) -> None:
        self.policy = model
        self.scheme = scheme
        self.fail = False

    def cascade_weights(self, model_id: str) -> None:
        if self.fail:
            raise ArithmeticError("the cascade broke")
        if self.scheme.sender.connected:
            self.scheme.send()


def become_middle(
    host: Host,
    upper: wsync.WeightSyncScheme,
    lower: wsync.WeightSyncScheme,
    make: Callable[[], nn.Module],
    method: str,
) -> None:
    """Follow ``upper``, and pass it on to two workers of one's own by ``lower``."""
    model = fill(make(), -1.0)
    host.below = Crew(2, method)
    lower.init_on_sender("policy", model=model, num_workers=2)
    context = CascadingHost(model, lower)
    host.models["policy"], host.schemes["policy"], host.schemes["lower"] = model, upper, lower
    host.below.follow(lower, make)
    upper.init_on_receiver("policy", context, worker_idx=0)
    upper.connect()


def below_forward(host: Host) -> list[Any]:
    assert host.below is not None
    return host.below.all("forward")


def break_cascade(host: Host, broken: bool) -> None:
    host.schemes["policy"].context.fail = broken


def close_below(host: Host) -> None:
    assert host.below is not None
    host.below.close()
