"""Programs with ``RayModuleTransform``, run as scripts. Actors do not import this module, nor what it imports."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_without_ray_the_error_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    (tmp_path / "program.py").write_text(f"""
import wsync
from collectors.ray_transform import RayModuleTransform
from torch import nn
keys = [("next", "reward")]
try:
    RayModuleTransform(nn.Identity, keys, keys)
except wsync.NotConnected as error:
    print(error)
lost = RayModuleTransform.__new__(RayModuleTransform)
vars(lost).update(_actor=None, _closed=False, _name="lost", _address="127.0.0.1:{free}", timeout=5.0)
try:
    lost.evaluate()
except wsync.NotConnected as error:
    print(error)
""")
    done = run_program(tmp_path / "program.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("Ray is not initialised: call ray.init()")
    assert second.startswith("RayModuleTransform (actor lost) cannot be reached") and f"127.0.0.1:{free}" in second


@pytest.mark.slow
@pytest.mark.parametrize("where", ["ray"])  # "local" takes as long, and is what unit tests look at
def test_the_curious_script_trains_both_models(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = ["--transform", where, "--frames", "2048", "--batch", "512", "--num-envs", "4"]
    done = run_program(ROOT / "scripts" / "train_curiosity.py", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"transform {where}: 2,048 frames" in done.stdout
    bonus = re.search(r"mean bonus of a batch: ([\d.]+) at the start, ([\d.]+) at the end", done.stdout)
    assert bonus and 0 < float(bonus[2]) < float(bonus[1])
    assert "policy: version 5, curiosity: version 5" in done.stdout  # the first went with connect
