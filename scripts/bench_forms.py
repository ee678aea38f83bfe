"""What each way to call ``send`` costs, beside ``send()`` without an argument: shared memory, 64 KiB to two workers.

The time is that of the call; what the caller takes to make the argument is shown apart. Every form is called in blocks
of its own, the blocks in turn; and call by call in turn with the others. *A byte and back* is what an acknowledgement
costs at least: a byte to each of two processes by a pipe, and one from each, after the same writes to the parameters.

    python scripts/bench_forms.py
    python scripts/bench_forms.py --phases    # where the time of a published update of 18 KiB goes

*warm*: updates one after another. *cold*: before each, 16 MiB and twenty thousand objects pass through the caches, as
when a trainer learns or waits between two updates.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
import typer
from harness.models import RevealingModel, fill
from harness.processes import echo, receive_updates, worker_processes
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tensordict import TensorDict

import wsync

Times = dict[str, list[float]]
MIB, TENSORS, ROUNDS = 0.0625, 4, 300
SMALL, UPDATES = (0.018, 6), 1000  # of --phases
BLOCK = 50  # calls of one form in a row
SETTLE = 10  # first calls of a block, more than those, that do not count: there the form before is still prepared
ROW = BLOCK + SETTLE
FLOOR = "a byte and back"


def exchange_byte(pipes: list[Connection]) -> None:
    """Send one byte to each process that runs ``echo``, and wait for one from each."""
    for channel in pipes:
        os.write(channel.fileno(), b"x")
    for channel in pipes:
        os.read(channel.fileno(), 1)


def parameters(model: RevealingModel) -> Any:
    """Return a new TensorDict of the model's tensors."""
    weights: Any = TensorDict.from_module(model)
    return weights.data


def forms(model: RevealingModel) -> dict[str, Callable[[], Any]]:
    """Return what makes the argument of ``send``, by the text of the call."""
    same = parameters(model)
    return {
        "send()": lambda: None,
        "send(model)": lambda: model,
        "send(td), the same": lambda: same,
        "send(td), made anew": lambda: parameters(model),
        "send(model.state_dict())": model.state_dict,
    }


def measure(scheme: wsync.WeightSyncScheme, given: str) -> list[Times]:
    """Return the seconds of each form's calls in blocks, those to make its argument, and those of its calls in turn.

    ``given`` is what the new ``scheme`` is initialised with: ``"model"`` or ``"weights"``.
    """
    model = RevealingModel(MIB, TENSORS)
    source: Any = model if given == "model" else parameters(model)
    scheme.init_on_sender("policy", num_workers=2, **{given: source})
    make = forms(model)
    names = [*make, FLOOR]
    blocks = [(name, place >= SETTLE) for _ in range(ROUNDS // BLOCK) for name in names for place in range(ROW)]
    found: list[Times] = []
    with worker_processes(echo, 2) as echoes, worker_processes(receive_updates, 2, scheme, MIB, TENSORS), scheme:
        scheme.connect()
        for order in (blocks, [(name, True) for name in names * ROUNDS]):
            took, made = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
            for number, (name, counts) in enumerate(order):
                fill(model, float(number))
                began = time.perf_counter()
                argument = None if name == FLOOR else make[name]()
                ready = time.perf_counter()
                if name == FLOOR:
                    exchange_byte(echoes.pipes)
                else:
                    scheme.send(argument)
                if counts:
                    took[name].append(time.perf_counter() - ready)
                    made[name].append(ready - began)
            found += [took, made]
    return found[:3]


def phases() -> Table:
    """Return the table of the phases of a small update, with warm and with cold caches."""
    scheme, large = wsync.SharedMemWeightSyncScheme(acknowledge="published"), torch.zeros(4 << 20)
    scheme.init_on_sender("policy", model=RevealingModel(*SMALL), num_workers=2)

    def stir() -> None:
        large.add_(1.0)
        sum({str(number): number for number in range(20_000)}.values())

    columns = list[dict[str, float]]()
    with worker_processes(receive_updates, 2, scheme, *SMALL), scheme:
        scheme.connect()
        for between, rounds in ((lambda: None, UPDATES), (stir, UPDATES // 10)):
            costs = defaultdict[str, list[float]](list)
            for _ in range(rounds):
                between()
                report = scheme.send()
                assert report is not None
                for name, seconds in {**report.phases, "all": report.seconds}.items():
                    costs[name].append(seconds * 1e6)
            columns.append({name: statistics.median(times) for name, times in costs.items()})
    table = Table("µs, p50", "warm", "cold", box=None)
    for name in columns[0]:
        table.add_row(name, *(f"{column[name]:.1f}" for column in columns))
    return table


def main(show_phases: Annotated[bool, typer.Option("--phases", help="Of one small update, instead.")] = False) -> None:
    """Measure, and show a table."""
    torch.set_num_threads(1)
    if show_phases:
        Console().print(phases())
        return
    title = f"{MIB:g} MiB in {TENSORS} tensors to 2 workers; p50 in µs"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("", "call", "in blocks", "beside send()", "in turn", "to make the argument"):
        table.add_column(heading, justify="left" if heading in ("", "call") else "right", no_wrap=True)
    cases = [(acknowledge, given) for acknowledge in ("installed", "published") for given in ("model", "weights")]
    for acknowledge, given in track(cases, transient=True):
        scheme = wsync.WeightSyncScheme.from_backend("shared_mem", acknowledge=acknowledge)
        blocks, made, turns = measure(scheme, given)
        label, base = f"{acknowledge}, {given}=", statistics.median(blocks["send()"])
        for name, times in blocks.items():
            p50, turn, own = (statistics.median(one) for one in (times, turns[name], made[name]))
            cells = (f"{p50 * 1e6:.1f}", f"{p50 / base:.2f} x", f"{turn * 1e6:.1f}", f"{own * 1e6:.1f}")
            table.add_row(label, name, *cells)
            label = ""
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
