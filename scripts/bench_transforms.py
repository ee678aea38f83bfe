"""What a transform costs: bytes that travel and the time of one acknowledged send, beside the whole float32 weights.

    python scripts/bench_transforms.py [--mib 8] [--tensors 20] [--rounds 60] [--backend shared_mem …]

Every transform and the plain send take turns, round by round, each with a worker of its own. The weights change before
each send. Prints medians. A store's send ends when the version is published, the others' when the worker has installed
it. At the end the weights of each worker are compared, bit for bit, with what the transforms make of the trainer's.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from harness.backends import check
from harness.processes import WorkerPipes, worker_processes
from harness.sides import engine
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import wsync
from wsync.transforms import Cast, Dequantize, Fuse, QuantizeInt8, Select

BACKENDS: dict[str, dict[str, Any]] = {
    "shared_mem": {},
    "multiprocess": {},
    "distributed": {"shared_memory": False},
    "store": {},  # a folder for each case
    "http": {},  # an engine for each case
}
Weights = dict[str, Tensor]


def make_model(mib: float, tensors: int) -> nn.Module:
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


def same(one: Weights, other: Weights) -> bool:
    """Whether names and bytes are the same."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8))
        for name, tensor in one.items()
    )


def receive(channel: Connection, _: int, backend: str, weights: Weights, transform: Any) -> None:
    """Receive into plain tensors; return them when the trainer asks for a version; a target of ``worker_processes``."""
    if backend == "http":
        with engine(wsync.engine_app(weights, token=None, receive_transform=transform)) as url:
            channel.send(url)
            channel.recv()
            channel.send(pickle.dumps(weights))  # a copy, where the pipe would share the memory
            return
    channel.send("ready")
    with channel.recv() as scheme:
        scheme.init_on_receiver("policy", model=weights, worker_idx=0)
        scheme.connect()
        version = channel.recv()
        while scheme.version < version:
            scheme.receive(1.0)
        with wsync.gate():
            channel.send(pickle.dumps(weights))


@contextmanager
def begun(
    backend: str, chosen: tuple[Any, Any], source: nn.Module
) -> Iterator[tuple[wsync.WeightSyncScheme, WorkerPipes]]:
    """Start a worker, and connect a scheme with it."""
    send, transform = chosen
    options: dict[str, Any] = {**BACKENDS[backend], "send_transform": send}
    weights = received(chosen, source)
    with TemporaryDirectory() as folder, worker_processes(receive, 1, backend, weights, transform) as pipes:
        (url,) = pipes.receive()
        options |= {"http": {"urls": url}, "store": {"url": folder}}.get(backend, {})
        if backend != "http":
            options["receive_transform"] = transform
        with wsync.WeightSyncScheme.from_backend(backend, **options) as scheme:
            scheme.init_on_sender("policy", model=source, num_workers=1)
            if backend != "http":
                pipes.send(scheme)
            scheme.connect()
            yield scheme, pipes


def measure(backend: str, mib: float, tensors: int, rounds: int) -> dict[str, tuple[int, float, bool]]:
    """Return ``{case: (bytes, median seconds, whether the worker's weights are right)}``."""
    source, chosen = make_model(mib, tensors), cases(tensors)
    with ExitStack() as stack:
        sides = {name: stack.enter_context(begun(backend, both, source)) for name, both in chosen.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        sizes: dict[str, int] = {}
        for _ in range(rounds):
            for parameter in source.parameters():
                nn.init.normal_(parameter)
            for name, (scheme, _) in sides.items():
                began = time.perf_counter()
                report = scheme.send()
                times[name].append(time.perf_counter() - began)
                assert report is not None
                sizes[name] = report.bytes
        found = {}
        for name, (scheme, pipes) in sides.items():
            (weights,) = pipes.ask(scheme.version)
            found[name] = (
                sizes[name],
                statistics.median(times[name]),
                same(pickle.loads(weights), received(chosen[name], source)),
            )
    return found


def main(
    mib: float = 8.0,
    tensors: int = 20,
    rounds: Annotated[int, typer.Option(min=1)] = 60,
    backend: Annotated[list[str] | None, typer.Option()] = None,
) -> None:
    """Print one table per backend; exit with 1 if a worker has wrong weights."""
    check(backend or [], BACKENDS)
    wrong = False
    for name in backend or list(BACKENDS):
        table = Table(title=f"{name}: {mib} MiB in {tensors} tensors, 1 worker, {rounds} rounds in turn")
        for column in ("transform", "bytes", "p50", "beside plain", "weights"):
            table.add_column(column, justify="left" if column == "transform" else "right")
        found = measure(name, mib, tensors, rounds)
        for case, (size, seconds, right) in found.items():
            ratio = seconds / found["plain"][1]
            verdict = "exact" if right else "WRONG"
            table.add_row(case, f"{size:,}", f"{seconds * 1e3:.2f} ms", f"{ratio:.2f} ×", verdict)
            wrong |= not right
        Console().print(table)
    raise typer.Exit(int(wrong))


if __name__ == "__main__":
    typer.run(main)
