"""The program of ``scripts/bench_sync.py``: settings in, cases measured one by one, tables and files out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
import torch
from harness.console import progress_bar
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from bench.conductor import measure
from bench.config import BenchConfig, BenchError, Case, cases, check, register
from bench.plots import picture
from bench.results import Row, exit_status, line, row, show, write
from bench.sides import NAME, MakeScheme, make_scheme, make_side
from bench.trainer import MakeSide


def sides(cfg: BenchConfig, case: Case, make_scheme: MakeScheme, folder: Path) -> dict[str, MakeSide]:
    """Return the sides of a case, by name."""
    found: dict[str, MakeSide] = {NAME: partial(make_side, make_scheme=make_scheme)}
    if cfg.peer is not None:
        from bench import peer

        if peer.takes_part(case):
            found[cfg.peer] = partial(peer.make_side, log=folder / f"{cfg.peer}.log")
    return found


def bench(cfg: BenchConfig, folder: Path, console: Console, make_scheme: MakeScheme = make_scheme) -> Sequence[Row]:
    """Measure all cases, and write the results into ``folder``, also after an interrupt.

    Args:
        cfg: what to measure.
        folder: the folder of the run.
        console: where results are shown.
        make_scheme: makes our schemes.

    Raises:
        BenchError: a setting is invalid, or the peer is not installed.
        KeyboardInterrupt: it was interrupted; no process is left.
    """
    check(cfg)
    if cfg.peer is not None and find_spec(cfg.peer) is None:
        raise BenchError(f"peer={cfg.peer} is not installed here: pip install -e '.[bench]'")
    todo, rows = list(cases(cfg)), []
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("starting", total=len(todo))
            for case in todo:
                progress.update(task, description=case.title)
                part = sides(cfg, case, make_scheme, folder)
                measured = measure(case, part, rounds=cfg.rounds, acting=cfg.acting, seconds=cfg.seconds)
                rows.append(row(case, measured, NAME))
                progress.advance(task)
                console.print(line(case.title, rows[-1]), soft_wrap=True, highlight=False)
    finally:
        settings = {name: value for name, value in vars(cfg).items() if name not in ("defaults", "hydra")}
        write(folder / "results.json", _machine(), settings, rows)
        picture(rows, folder / "latency.png")
        show(console, rows)
    return rows


def _machine() -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", "tensordict", "ray") if find_spec(name)}
    load = [round(one, 2) for one in os.getloadavg()]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cores": os.cpu_count(), "gpu": gpu, "load": load, "python": sys.version.split()[0], **versions}


register()


@hydra.main(version_base="1.3", config_path=None, config_name="bench_sync")
def main(composed: DictConfig) -> None:
    """Run the benchmark, in a folder of its own."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    folder, console = Path(HydraConfig.get().runtime.output_dir), Console()
    if not console.is_terminal:
        console = Console(width=180)
    cfg = OmegaConf.to_object(composed)
    assert isinstance(cfg, BenchConfig)
    try:
        rows = bench(cfg, folder, console)
    except BenchError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        console.print(f"→ {os.path.relpath(folder)}", soft_wrap=True, highlight=False)
    sys.exit(exit_status(rows))
