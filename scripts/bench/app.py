"""The app behind ``scripts/bench_sync.py``: settings in, cases measured one by one, tables and files out."""

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
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from bench import ours
from bench.cases import BenchError, Case
from bench.conductor import measure
from bench.config import BenchConfig, cases, check, register
from bench.figures import exit_status, figures, row
from bench.plots import picture
from bench.report import Reporter, Row, show, write
from bench.sides import MakeScheme
from bench.trainer import MakeSide


def sides(cfg: BenchConfig, case: Case, make_scheme: MakeScheme, folder: Path) -> dict[str, MakeSide]:
    """Who takes part in a case."""
    found: dict[str, MakeSide] = {ours.NAME: partial(ours.make_side, make_scheme=make_scheme)}
    if cfg.peer is not None:
        from bench import peer

        if peer.takes_part(case):
            found[cfg.peer] = partial(peer.make_side, log=folder / f"{cfg.peer}.log")
    return found


def bench(
    cfg: BenchConfig, folder: Path, console: Console, make_scheme: MakeScheme = ours.make_scheme
) -> Sequence[Row]:
    """Measure all cases, and write what was found into ``folder``, also if it is interrupted.

    Args:
        cfg: what to measure.
        folder: of the run.
        console: where results are shown.
        make_scheme: makes our schemes.

    Raises:
        BenchError: the settings do not go together, or there is no such peer here.
        KeyboardInterrupt: it was interrupted; nothing is left running.
    """
    check(cfg)
    if cfg.peer is not None and find_spec(cfg.peer) is None:
        raise BenchError(f"peer={cfg.peer} is not installed here: pip install -e '.[bench]'")
    todo, rows = list(cases(cfg)), []
    try:
        with Reporter(console, len(todo)) as reporter:
            for case in todo:
                reporter.begin(case)
                part = sides(cfg, case, make_scheme, folder)
                measured = measure(case, part, rounds=cfg.rounds, acting=cfg.acting, seconds=cfg.seconds)
                rows.append(row(case, {name: figures(case, one) for name, one in measured.items()}, ours.NAME))
                reporter.done(case, rows[-1])
    finally:
        settings = {name: value for name, value in vars(cfg).items() if name not in ("defaults", "hydra")}
        write(folder / "results.json", _machine(), settings, rows)
        picture(rows, folder / "latency.png")
        show(console, rows)
    return rows


def _machine() -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", "tensordict", "ray")}
    load = [round(one, 2) for one in os.getloadavg()]
    return {"cores": os.cpu_count(), "load": load, "python": sys.version.split()[0], **versions}


register()


@hydra.main(version_base="1.3", config_path=None, config_name="bench_sync")
def main(composed: DictConfig) -> None:
    """Run the benchmark, in a folder of its own."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as tidily as Ctrl-C
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
