"""What a transform costs: bytes that travel and the time of one acknowledged send, beside the whole float32 weights.

    python scripts/bench_transforms.py [--mib 8] [--tensors 20] [--rounds 60] [--backend shared_mem …]

Every transform and the plain send take turns, round by round, each with a worker of its own. The weights change before
each send. Prints medians. A store's send ends when the version is published, the others' when the worker has installed
it. At the end the weights of each worker are compared, bit for bit, with what the transforms make of the trainer's.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import wsync
from wsync.testing.asgi import serve
from wsync.transforms import Cast, Dequantize, Fuse, QuantizeInt8, Select

BACKENDS: dict[str, dict[str, Any]] = {
    "shared_mem": {},
    "multiprocess": {},
    "distributed": {"shared_memory": False},
    "store": {},  # a folder for each case
    "http": {},  # an engine for each case
    "ray": {"shared_memory": False},
    "ray, object store": {"transport": "object_store"},
}
Weights = dict[str, Tensor]
Digest = Callable[[int], str]
"""``version`` → the digest of a worker's weights, once it has that version; then it ends. Called once."""


def model(mib: float, tensors: int) -> nn.Module:
    """Return a stack of square layers, ``mib`` MiB in ``tensors`` float32 tensors."""
    width = max(1, int((mib * 2**20 / 4 / tensors) ** 0.5))
    return nn.ModuleDict({f"layer{i}": nn.Linear(width, width, bias=False) for i in range(tensors)})


def cases(tensors: int) -> dict[str, tuple[Any, Any]]:
    """Return ``{name: (send_transform, receive_transform)}``."""
    names = [f"layer{i}.weight" for i in range(tensors)]
    return {
        "plain": (None, None),
        "Cast(bfloat16)": (Cast("bfloat16"), None),
        "Cast and back": (Cast("bfloat16"), Cast("float32")),
        "QuantizeInt8 and back": (QuantizeInt8(), Dequantize()),
        "Fuse all": (Fuse({"all": names}), None),
        "Select one tenth": (Select(*names[: max(1, tensors // 10)]), None),
    }


def received(chosen: tuple[Any, Any], source: nn.Module) -> Weights:
    """Return copies of the weights that a worker ends up with."""
    weights: Any = {name: tensor.detach() for name, tensor in source.state_dict().items()}
    for transform in chosen:
        weights = weights if transform is None else transform(weights)
    return {name: tensor.clone() for name, tensor in weights.items()}


def digest(weights: Weights) -> str:
    """Return a hash of names and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode() + tensor.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Worker:
    """A worker: receives into plain tensors of the kinds that arrive."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def join(self, scheme: wsync.WeightSyncScheme) -> None:
        """Connect as worker 0."""
        self._scheme = scheme
        scheme.init_on_receiver("policy", model=self.weights, worker_idx=0)
        scheme.connect()

    def digest(self, version: int) -> str:
        """Wait for the version; return a hash of the weights, and leave."""
        while self._scheme.version < version:
            self._scheme.receive(1.0)
        with wsync.gate():
            found = digest(self.weights)
        self._scheme.shutdown()
        return found


def work(scheme: wsync.WeightSyncScheme, weights: Weights, versions: Any, digests: Any) -> None:
    """A worker in a process of its own."""
    worker = Worker(weights)
    worker.join(scheme)
    digests.put(worker.digest(versions.get()))


def work_as_engine(weights: Weights, transform: Any, versions: Any, digests: Any) -> None:
    """A worker of the ``http`` backend: an engine of plain tensors; its address is its first answer."""
    with serve(wsync.engine_app(weights, token=None, receive_transform=transform)) as address:
        digests.put(address)
        versions.get()
        digests.put(digest(weights))


def start(target: Any, *arguments: Any) -> tuple[Digest, Any]:
    """Start a worker's process; return its ``Digest`` and the queue of its answers."""
    context = multiprocessing.get_context("forkserver")
    versions, digests = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=target, args=(*arguments, versions, digests))
    process.start()

    def ask(version: int) -> str:
        versions.put(version)
        found = digests.get()
        process.join()
        return found

    return ask, digests


def start_actor(scheme: Any, source: nn.Module, weights: Weights) -> Digest:
    """Start a Ray actor that has joined the scheme."""
    import ray

    make: Any = ray.remote(Worker)
    actor = make.options(num_cpus=0).remote(weights)
    scheme.init_on_sender("policy", model=source, num_workers=1)
    joining = actor.join.remote(scheme)
    scheme.connect()
    ray.get(joining)
    return lambda version: ray.get(actor.digest.remote(version))


def start_case(
    backend: str, chosen: tuple[Any, Any], source: nn.Module, folder: str
) -> tuple[wsync.WeightSyncScheme, Digest]:
    """Start a worker, and connect a scheme with it."""
    send, receive = chosen
    options: dict[str, Any] = {**BACKENDS[backend], "send_transform": send}
    weights, name = received(chosen, source), backend.partition(",")[0]
    if name == "http":
        ask, answers = start(work_as_engine, weights, receive)
        scheme = wsync.WeightSyncScheme.from_backend(name, **options, urls=answers.get())
        scheme.init_on_sender("policy", model=source, num_workers=1)
        scheme.connect()
        return scheme, ask
    if name == "store":
        options["url"] = folder
    scheme = wsync.WeightSyncScheme.from_backend(name, **options, receive_transform=receive)
    if name == "ray":
        return scheme, start_actor(scheme, source, weights)
    scheme.init_on_sender("policy", model=source, num_workers=1)
    ask, _ = start(work, scheme, weights)
    scheme.connect()
    return scheme, ask


def measure(backend: str, mib: float, tensors: int, rounds: int, folder: str) -> dict[str, tuple[int, float, bool]]:
    """Return ``{case: (bytes, median seconds, whether the worker's weights are right)}``."""
    source, chosen = model(mib, tensors), cases(tensors)
    with ExitStack() as stack:
        if backend.startswith("ray"):
            from collectors.distributed.ray_cluster import Cluster

            stack.callback(Cluster("local").close)
        begun = {
            name: start_case(backend, both, source, f"{folder}/{i}") for i, (name, both) in enumerate(chosen.items())
        }
        times: dict[str, list[float]] = {name: [] for name in begun}
        sizes: dict[str, int] = {}
        for _ in range(rounds):
            for parameter in source.parameters():
                nn.init.normal_(parameter)
            for name, (scheme, _) in begun.items():
                began = time.perf_counter()
                report = scheme.send()
                times[name].append(time.perf_counter() - began)
                assert report is not None
                sizes[name] = report.bytes
        found = {}
        for name, (scheme, ask) in begun.items():
            right = ask(scheme.version) == digest(received(chosen[name], source))
            found[name] = (sizes[name], statistics.median(times[name]), right)
            scheme.shutdown()
    return found


def main(
    mib: float = 8.0,
    tensors: int = 20,
    rounds: Annotated[int, typer.Option(min=1)] = 60,
    backend: Annotated[list[str] | None, typer.Option()] = None,
) -> None:
    """Print one table per backend; exit with 1 if a worker has wrong weights."""
    multiprocessing.set_forkserver_preload(["wsync", "wsync.testing.asgi"])
    wrong = False
    for name in backend or list(BACKENDS):
        table = Table(title=f"{name}: {mib} MiB in {tensors} tensors, 1 worker, {rounds} rounds in turn")
        for column in ("transform", "bytes", "p50", "beside plain", "weights"):
            table.add_column(column, justify="left" if column == "transform" else "right")
        with TemporaryDirectory() as folder:
            found = measure(name, mib, tensors, rounds, folder)
        plain = found["plain"][1]
        for case, (size, seconds, right) in found.items():
            verdict = "exact" if right else "WRONG"
            table.add_row(case, f"{size:,}", f"{seconds * 1e3:.2f} ms", f"{seconds / plain:.2f} ×", verdict)
            wrong |= not right
        Console().print(table)
    raise typer.Exit(int(wrong))


if __name__ == "__main__":
    typer.run(main)
