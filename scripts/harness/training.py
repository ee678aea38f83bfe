"""Runs of ``train.py`` and of Stable-Baselines3 with the same settings, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from learning.config import register_configs

ROOT = Path(__file__).resolve().parents[2]
PEER = "stable-baselines3"
Outcome = Mapping[str, Any]
"""``returns`` (the frames at the end of each episode, and its return), ``solved``, ``seconds`` and ``frames``."""


def check_peer() -> None:
    """Check that the peer is installed.

    Raises:
        typer.BadParameter: it is not.
    """
    if find_spec("stable_baselines3") is None:
        raise typer.BadParameter(f"{PEER} is not installed here: pip install -e '.[bench]', or say --no-peer")


def train(overrides: Sequence[str]) -> Outcome:
    """Run train.py once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *overrides, f"hydra.run.dir={folder}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(folder, "summary.json").read_text())
    returns = [(row["frames"], value) for row in rows for value in row["episode_returns"]]
    return {"returns": returns, **{name: summary[name] for name in ("solved", "seconds", "frames")}}


def settings_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings that train.py has with `overrides`, as plain values."""
    register_configs()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = OmegaConf.to_container(compose("train", overrides=[*overrides]), resolve=True)
    assert isinstance(settings, dict)
    return {str(name): value for name, value in settings.items()}


def train_peer(settings: Mapping[str, Any]) -> Outcome:
    """Run the peer once with the settings of a run of train.py."""
    command = [sys.executable, "scripts/harness/sb3.py", json.dumps(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])
