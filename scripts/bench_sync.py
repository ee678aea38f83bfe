"""What an update of the workers' weights costs, by backend, payload and number of workers; beside TorchRL if wanted.

    python scripts/bench_sync.py                                     # everything: 20 minutes or more
    python scripts/bench_sync.py kind=send backends=[shared_mem] mib=[1,64] workers=[2]
    python scripts/bench_sync.py kind=update backends=[ray] peer=torchrl
    python scripts/bench_sync.py --help                              # every setting there is

Every round gives the weights values that they never had, times the call, and then has every worker forward: what it
saw must be exactly those values. If it is not, the case is marked WRONG and the exit status is 1. Each side of a case
(we, and the peer) is a trainer process of its own with its own workers; they take turns in the same run.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from harness.backends import BACKENDS, takes
from harness.processes import WorkerError, WorkerPipes, worker_processes
from harness.sides import Case, Round, our_side
from matplotlib.ticker import FuncFormatter, NullFormatter
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from learning.reporting.plots import INK, new_figure

_TURNS = 10  # of each side
_TIMEOUT = 90.0  # seconds for an answer of a side, above those that it works
_TITLES = {"send": "A send, standalone", "update": "A collector's update_policy_weights_(), between batches"}
Row = dict[str, Any]


@dataclass
class BenchConfig:
    """All settings.

    Attributes:
        backends: names of backends; with ``kind=send`` also ``store`` and ``http``.
        mib: sizes of the weights of a standalone send.
        tensors: their number; ``auto``: by the size.
        policy_mib: sizes of the policies of a collector's workers; 0.018 is 2 × 64.
        workers: numbers of workers, one case for each.
        rounds: timed updates of each side of a case.
        seconds: limit for the rounds of a side together; then there are fewer rounds.
        kind: ``send`` (standalone), ``update`` (a collector's), or ``both``.
        peer: ``torchrl`` measures it as well, in alternation.
        device: where the model of a standalone send's trainer is: ``cpu`` or ``cuda``.
        worker_device: where its workers' models are. ``cuda`` at both ends: with NCCL and ``backends=[cuda]``.
        out: the folder for the results.
    """

    backends: list[str] = field(default_factory=lambda: list(BACKENDS))
    mib: list[float] = field(default_factory=lambda: [0.0625, 1.0, 64.0])
    tensors: str = "auto"
    policy_mib: list[float] = field(default_factory=lambda: [0.018, 1.0])
    workers: list[int] = field(default_factory=lambda: [1, 2])
    rounds: int = 200
    seconds: float = 20.0
    kind: str = "both"
    peer: str | None = None
    device: str = "cpu"
    worker_device: str = "cpu"
    out: str = "outputs/bench_sync"

    @property
    def on_gpus(self) -> bool:
        """Whether both ends have their models on a GPU."""
        return self.device == self.worker_device == "cuda"


def check(cfg: BenchConfig) -> None:
    """Exit with a message that names the valid values if a setting is invalid."""
    known = [*BACKENDS, *(["store", "http"] if cfg.kind == "send" else []), *(["cuda"] if cfg.on_gpus else [])]
    if unknown := set(cfg.backends) - set(known):
        sys.exit(f"unknown backend {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if cfg.kind not in ("send", "update", "both") or cfg.peer not in (None, "torchrl"):
        sys.exit(f"kind is send, update or both, not {cfg.kind}; peer is torchrl or null, not {cfg.peer}")
    if (cfg.device, cfg.worker_device) != ("cpu", "cpu") and cfg.kind != "send":
        sys.exit("device and worker_device are settings of kind=send: policies of collectors act on the CPU")
    if cfg.tensors != "auto" and not (cfg.tensors.isdecimal() and int(cfg.tensors)):
        sys.exit(f"tensors is auto or a number, not {cfg.tensors}")
    if min([*cfg.mib, *cfg.policy_mib, *cfg.workers, cfg.rounds, cfg.seconds]) <= 0:
        sys.exit("sizes, numbers of workers, rounds and seconds are above 0")
    if cfg.peer is not None and find_spec(cfg.peer) is None:
        sys.exit(f"peer={cfg.peer} is not installed here: pip install -e '.[bench]'")


def cases(cfg: BenchConfig) -> Iterator[Case]:
    """Yield the cases to measure, small ones before large ones."""
    sizes = {"send": cfg.mib, "update": cfg.policy_mib}
    for kind in sizes if cfg.kind == "both" else (cfg.kind,):
        for mib, backend, workers in product(sizes[kind], cfg.backends, cfg.workers):
            tensors = {"send": 4 if mib <= 0.25 else 20 if mib <= 8 else 100, "update": 6 if mib <= 0.1 else 20}[kind]
            if kind == "send" and cfg.tensors != "auto":
                tensors = int(cfg.tensors)
            for variant, chosen in _variants(backend, cfg.on_gpus).items():
                yield Case(kind, backend, mib, tensors, workers, dict(chosen), variant, cfg.device, cfg.worker_device)


def _variants(backend: str, on_gpus: bool) -> Mapping[str, dict[str, Any]]:
    """Return the options of a scheme by what they are called."""
    if takes(backend, "acknowledge"):
        return {name: {"acknowledge": name} for name in ("installed", "published")}
    if not takes(backend, "shared_memory"):
        return {"": {}}
    found: dict[str, dict[str, Any]] = {"": {}, "gloo": {"shared_memory": False}}
    return {**found, "nccl": {"shared_memory": False, "backend": "nccl"}} if on_gpus else found


# --- the sides of a case, in turn ---


def serve_side(channel: Connection, _: int, name: str, case: Case, log: Path) -> None:
    """Be the trainer of a side: make the rounds that are asked for; a target of ``worker_processes``."""
    os.setsid()  # so that all processes of this side can be killed together
    channel.send(os.getpid())
    try:
        make = our_side
        if name != "wsync":
            with log.open("a") as file:  # its output, and its workers'
                os.dup2(file.fileno(), sys.stdout.fileno())
                os.dup2(file.fileno(), sys.stderr.fileno())
            from harness import torchrl_side

            make = torchrl_side.sending if case.kind == "send" else torchrl_side.collecting
        with make(case) as side:
            channel.send("ready")
            with suppress(EOFError):
                while True:
                    count, seconds = channel.recv()
                    channel.send(side.rounds(count, seconds, int(case.mib * 2**20)))
    except (BrokenPipeError, KeyboardInterrupt):
        return
    except Exception:  # noqa: BLE001  shown in the row of the case
        with suppress(BrokenPipeError):
            channel.send(traceback.format_exc())


def measure(case: Case, names: list[str], rounds: int, seconds: float, log: Path) -> dict[str, list[Round] | str]:
    """Return the rounds of each side of a case, or its error; all are alive at once, and take turns."""
    found: dict[str, list[Round] | str] = {name: [] for name in names}
    with ExitStack() as stack:
        sides, sessions = dict[str, WorkerPipes](), list[int]()
        stack.callback(_kill, sessions)  # at the very end: what is left of them
        for name in names:
            one = worker_processes(serve_side, 1, name, case, log, timeout=_TIMEOUT + seconds)
            sides[name] = stack.enter_context(one)
            sessions += sides[name].receive()
        for side in sides.values():
            stack.callback(side.pipes[0].close)  # all of them, before the first one is waited for
        for turn in range(-1, _TURNS):
            for name, side in sides.items():
                done = found[name]
                if isinstance(done, str):
                    continue
                if turn >= 0:
                    side.send((math.ceil(rounds / _TURNS), seconds / _TURNS))
                try:
                    (answer,) = side.receive()
                except WorkerError as error:
                    answer = str(error)
                if isinstance(answer, list):
                    done += answer
                elif turn >= 0 or answer != "ready":
                    found[name] = answer
    return found


def _kill(sessions: list[int]) -> None:
    for leader in sessions:
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


# --- results ---


def row_of(case: Case, measured: Mapping[str, list[Round] | str]) -> Row:
    """Return the figures of a case: ours, and those of the peer under its name; times in µs."""
    sides = {name: _figures(one) for name, one in measured.items()}
    ours = sides.pop("wsync")
    found: Row = {**asdict(case), "label": case.label, "title": case.title, **ours, "peers": sides}
    for side in sides.values():
        if "p50_us" in side and "p50_us" in ours:
            side["ratio"] = side["p50_us"] / ours["p50_us"]
    return found


def _figures(rounds: list[Round] | str) -> Row:
    if isinstance(rounds, str):
        return {"status": "failed", "error": rounds}
    times, copies = sorted(one.seconds * 1e6 for one in rounds), [one.copy * 1e6 for one in rounds]
    wrong = [one.wrong for one in rounds if one.wrong]
    middle, copied = statistics.median(times), statistics.median(copies)
    return {
        "status": "WRONG" if wrong else "ok",
        "wrong": len(wrong),
        "error": wrong[0] if wrong else "",
        "rounds": len(rounds),
        "p50_us": middle,
        "p95_us": times[min(len(times) - 1, int(0.95 * len(times)))],
        "min_us": times[0],
        "copy_us": copied,
        "over_copy": middle / copied,
    }


def show(console: Console, rows: list[Row]) -> None:
    """Print a table of each kind of case, and what went wrong."""
    for kind, title in _TITLES.items():
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in ("backend", "MiB", "to", "p50", "p95", "min", "copy", "peer p50", "p95", "ratio"):
            table.add_column(column, justify="left" if column == "backend" else "right", no_wrap=True)
        for row in (one for one in rows if one["kind"] == kind):
            names = ("p50_us", "p95_us", "min_us")
            times = [short(row[name]) for name in names] if "p50_us" in row else [row["status"], "", ""]
            over = f"{row['over_copy']:.1f}" if "p50_us" in row else ""
            peer = next(iter(row["peers"].values()), {})
            beside = [short(peer[name]) for name in names[:2]] if "p50_us" in peer else [peer.get("status", ""), ""]
            ratio = f"{peer['ratio']:.1f}" if "ratio" in peer else ""
            where = ", ".join(one for one in (row["device"], row["worker_device"]) if one != "cpu")
            label = f"{row['label']} ({where})" if where else row["label"]
            table.add_row(label, f"{row['mib']:g}", str(row["workers"]), *times, over, *beside, ratio)
        if table.row_count:
            console.print(table)
    console.print("Times in µs, unless marked ms. copy: ratio of p50 to a plain copy of the same bytes, in turn.")
    for row in rows:
        for name, side in {"wsync": row, **row["peers"]}.items():
            if side["status"] != "ok":
                error = side["error"].strip().splitlines()[-1]
                console.print(f"{side['status']}: {row['title']}, {name}: {error}", highlight=False, markup=False)


def short(value: float) -> str:
    """Format microseconds."""
    return f"{value:,.0f}" if value < 1e4 else f"{value / 1e3:,.1f} ms"


def picture(rows: list[Row], path: Path) -> None:
    """Plot latency over payload for the largest number of workers: a panel for each kind, narrow as a phone."""
    rows = [row for row in rows if "p50_us" in row]
    kinds = [kind for kind in _TITLES if any(row["kind"] == kind for row in rows)]
    if not kinds:
        return
    figure, axes = new_figure(4.4, len(kinds), "Weight sync", "", height=5.4 * len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        workers = max(row["workers"] for row in rows if row["kind"] == kind)
        mine = [one for one in rows if (one["kind"], one["workers"]) == (kind, workers)]
        mine.sort(key=lambda one: one["mib"])
        for label in dict.fromkeys(row["label"] for row in mine):
            points = [one for one in mine if one["label"] == label]
            (line,) = ax.plot([one["mib"] for one in points], [one["p50_us"] for one in points], "o-", label=label)
            peers = [(one["mib"], side) for one in points for side in one["peers"].values() if "p50_us" in side]
            ax.plot([at for at, _ in peers], [side["p50_us"] for _, side in peers], "x:", color=line.get_color())
        copies = {one["mib"]: one["copy_us"] for one in mine}
        ax.plot([*copies], [*copies.values()], "--", color=INK, label="a plain copy")
        ax.set(xscale="log", yscale="log", xlabel="weights, MiB", ylabel="median, µs")
        ax.set_xticks(sizes := sorted({one["mib"] for one in mine}), [f"{size:g}" for size in sizes])
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
        ax.set_title(f"{_TITLES[kind]},\nto {workers} workers; dotted: TorchRL", loc="left", fontsize=8.5, color=INK)
        ax.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.13))
    figure.savefig(path)


def bench(cfg: BenchConfig, console: Console) -> list[Row]:
    """Measure all cases, and write the results, also after an interrupt."""
    check(cfg)
    todo, rows, folder = list(cases(cfg)), list[Row](), Path(cfg.out)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("starting", total=len(todo))
            for case in todo:
                progress.update(task, description=case.title)
                # Most of TorchRL's schemes work in its collectors only.
                beside = cfg.peer and (case.kind == "update" or case.backend in ("shared_mem", "multiprocess"))
                names = ["wsync", *([cfg.peer] if cfg.peer and beside else [])]
                measured = measure(case, names, cfg.rounds, cfg.seconds, folder / "peer.log")
                rows.append(row_of(case, measured))
                progress.advance(task)
    finally:
        load, gpu = os.getloadavg()[0], torch.cuda.get_device_name() if torch.cuda.is_available() else None
        machine = {"cores": os.cpu_count(), "gpu": gpu, "load": load, "torch": torch.__version__}
        found = {"machine": machine, "cases": rows}
        (folder / "results.json").write_text(json.dumps(found, indent=2, ensure_ascii=False))
        picture(rows, folder / "latency.png")
        show(console, rows)
    return rows


def main(given: list[str]) -> None:
    """Run the benchmark with settings of the command line."""
    if given == ["--help"]:
        sys.exit(f"{__doc__}\n{BenchConfig.__doc__}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    try:
        cfg: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(BenchConfig), OmegaConf.from_cli(given)))
        rows = bench(cfg, console)
    except OmegaConfBaseException as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    console.print(f"→ {cfg.out}", soft_wrap=True, highlight=False)
    sys.exit(int(any(row["status"] != "ok" for row in rows)))  # errors of the peer do not count


if __name__ == "__main__":
    main(sys.argv[1:])
