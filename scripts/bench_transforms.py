"""What a transform costs: bytes that travel and the time of one acknowledged send, beside the whole float32 weights.

    python scripts/bench_transforms.py [--mib 8] [--tensors 20] [--rounds 60] [--backend shared_mem …]

Every transform and the plain send take turns, round by round, each with a worker of its own. Prints medians. A store's
send ends when the version is published, the others' when the worker has installed it.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import wsync
from wsync.testing.asgi import serve
from wsync.transforms import Cast, Dequantize, Fuse, QuantizeInt8, Select

BACKENDS: dict[str, dict[str, Any]] = {
    "shared_mem": {},
    "multiprocess": {},
    "distributed": {"shared_memory": False},
    "store": {},  # a folder for each case
    "http": {},  # an engine for each case
}


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


def work(scheme: wsync.WeightSyncScheme, weights: dict[str, Any], done: Any) -> None:
    """A worker: receives into plain tensors of the kinds that arrive."""
    scheme.init_on_receiver("policy", model=weights, worker_idx=0)
    scheme.connect()
    done.wait()
    scheme.shutdown()


def work_as_engine(weights: dict[str, Any], transform: Any, url: Any, done: Any) -> None:
    """A worker of the ``http`` backend: an engine of plain tensors; puts its address into ``url``."""
    with serve(wsync.engine_app(weights, token=None, receive_transform=transform)) as address:
        url.put(address)
        done.wait()


def received(chosen: tuple[Any, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """Return tensors of the kinds that a worker ends up with."""
    for transform in chosen:
        weights = weights if transform is None else dict(transform(weights))
    return {name: tensor.clone() for name, tensor in weights.items()}


def measure(backend: str, mib: float, tensors: int, rounds: int, folder: str) -> dict[str, tuple[int, float]]:
    """Return ``{case: (bytes, median seconds)}``; ``folder`` is for a store's versions."""
    context, source = multiprocessing.get_context("spawn"), model(mib, tensors)
    weights = {name: tensor.detach() for name, tensor in source.state_dict().items()}
    done, schemes, workers = context.Event(), dict[str, wsync.WeightSyncScheme](), list[Any]()
    for number, (name, chosen) in enumerate(cases(tensors).items()):
        send, receive = chosen
        options, tensors_there = dict(BACKENDS[backend]), received(chosen, weights)
        if backend == "http":
            url = context.SimpleQueue()
            workers.append(context.Process(target=work_as_engine, args=(tensors_there, receive, url, done)))
            workers[-1].start()
            options["urls"] = url.get()
        elif backend == "store":
            options["url"] = f"{folder}/{number}"
        if backend != "http":
            options["receive_transform"] = receive
        scheme = wsync.WeightSyncScheme.from_backend(backend, **options, send_transform=send)
        scheme.init_on_sender("policy", model=source, num_workers=1)
        if backend != "http":
            workers.append(context.Process(target=work, args=(scheme, tensors_there, done)))
            workers[-1].start()
        schemes[name] = scheme
    times: dict[str, list[float]] = {name: [] for name in schemes}
    sizes: dict[str, int] = {}
    for scheme in schemes.values():
        scheme.connect()
    for _ in range(rounds):
        for name, scheme in schemes.items():
            began = time.perf_counter()
            report = scheme.send()
            times[name].append(time.perf_counter() - began)
            assert report is not None
            sizes[name] = report.bytes
    done.set()
    for scheme, worker in zip(schemes.values(), workers, strict=True):
        scheme.shutdown()
        worker.join()
    return {name: (sizes[name], statistics.median(times[name])) for name in schemes}


def main(
    mib: float = 8.0,
    tensors: int = 20,
    rounds: int = 60,
    backend: Annotated[list[str] | None, typer.Option()] = None,
) -> None:
    """Print one table per backend."""
    for name in backend or list(BACKENDS):
        table = Table(title=f"{name}: {mib} MiB in {tensors} tensors, 1 worker, {rounds} rounds in turn")
        for column in ("transform", "bytes", "p50", "beside plain"):
            table.add_column(column, justify="left" if column == "transform" else "right")
        with TemporaryDirectory() as folder:
            found = measure(name, mib, tensors, rounds, folder)
        plain = found["plain"][1]
        for case, (size, seconds) in found.items():
            table.add_row(case, f"{size:,}", f"{seconds * 1e3:.2f} ms", f"{seconds / plain:.2f} ×")
        Console().print(table)


if __name__ == "__main__":
    typer.run(main)
