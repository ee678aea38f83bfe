"""The files in examples/ run as their first lines say."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NEEDS = {"ray_actors": "ray", "collect": "gymnasium", "own_loop": "gymnasium", "dqn": "gymnasium", "sac": "gymnasium"}
SHORTER = {"sac": ["--frames", "832"], "own_loop": ["10"]}  # 13 batches: an episode of 200 steps has ended by then
TESTED_ELSEWHERE = (
    *("dqn", "grpo_vllm", "probe_engine", "several_machines", "sharded_trainer", "slow_link", "unlike_ends"),
)
"""Below, in `test_store_chains.py`, in `test_train.py`, and in tests/engines."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAST_LINES = {
    "collect": "10 updates, median latency ",
    "failures": "version 7 is in both workers",
    "ray_actors": "both actors act with the trainer's weights",
}
pytestmark = pytest.mark.slow


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [*command], capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES if path.stem not in TESTED_ELSEWHERE])
def test_an_example_runs_as_a_script(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"the example needs {NEEDS[name]}, which is not installed")
    program, options = FOLDER / f"{name}.py", SHORTER.get(name, ())
    if name == "ray_actors":  # Ray's workers import torch themselves
        printed = run(sys.executable, program, folder=tmp_path)
    else:
        printed = run_program(program, *options, folder=tmp_path, timeout=280, PYTHONPATH=str(ROOT)).stdout
    assert printed.splitlines()[-1].startswith(LAST_LINES.get(name, ""))


def test_a_killed_worker_of_own_loop_is_replaced_and_ctrl_c_ends_all(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="the example needs gymnasium, which is not installed")
    command, own = [sys.executable, "-u", FOLDER / "own_loop.py", "1000000"], {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=tmp_path, env=own, **pipes) as program:
        try:
            lines = (line for line in program.stdout if line.startswith("update "))
            workers = []
            for _ in range(2):  # before, and twenty updates after one is killed
                assert next(lines) and next(lines)
                children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
                workers.append({one for one in children if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()})
                if len(workers) == 1:
                    os.kill(int(killed := min(workers[0])), signal.SIGKILL)
            os.killpg(program.pid, signal.SIGINT)
            assert "interrupted" in program.stdout.read() and program.wait() == 0
        finally:
            program.kill()
    assert len(workers[0]) == len(workers[1]) == 2 and workers[0] - workers[1] == {killed}
    assert not [one for one in workers[1] if Path(f"/proc/{one}").exists()]


def test_several_machines_under_slurm(tmp_path: Path) -> None:
    """Stand-ins for Slurm's commands start torchrun on each of two nodes, both on this machine."""
    commands = {
        "scontrol": "echo 127.0.0.1",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "srun": 'SLURM_NODEID=1 "$@" &\nSLURM_NODEID=0 "$@"\nwait $!',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nset -eu\n{body}\n")
        (tmp_path / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    slurm = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "1", "MASTER_PORT": port}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = run("bash", FOLDER / "several_machines.sbatch", folder=ROOT, PATH=path, **slurm)
    assert re.findall(r"rank (\d+): version 6", printed) == ["1"], "one process on each of the nodes"


def test_sharded_trainer(tmp_path: Path) -> None:
    printed = run(*TORCHRUN, FOLDER / "sharded_trainer.py", tmp_path / "store", folder=tmp_path)
    lines = printed.splitlines()
    assert [line.split(" ->")[0] for line in lines[:-1]] == [f"version {version}" for version in range(2, 7)]
    assert re.fullmatch(r"version 6, \d+ bytes: both workers have the gathered weights", lines[-1])
    assert len([*tmp_path.glob("store/policy/v*/*.safetensors")]) == 2 * 3, "two ranks, and the newest three versions"


def test_dqn_learns_from_what_workers_collect(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="the example needs gymnasium, which is not installed")
    done = run_program(FOLDER / "dqn.py", "--frames", "8192", folder=tmp_path, PYTHONPATH=str(ROOT))
    returns = [float(value) for value in re.findall(r"return +([-.0-9]+)", done.stdout)]
    assert max(returns[1:]) > 2 * returns[0]


@pytest.mark.parametrize(
    ("carrier", "precision"), [("shared_mem", "int8"), ("store", "int8"), ("http", "bfloat16"), ("ray", "bfloat16")]
)
def test_a_gpt2_and_an_engine_of_another_class(carrier: str, precision: str, tmp_path: Path) -> None:
    """The example compares the logits of each version, which a generating process has made, with a reference's."""
    pytest.importorskip("transformers", reason="the GPT-2 is one of transformers, which is not installed")
    if carrier == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    done = run_program(FOLDER / "unlike_ends.py", f"{carrier}-{precision}", folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout.startswith(f"GPT2LMHeadModel → Engine by {carrier}, {precision}:\n")
    line = r"^version \d+: (\d+) bytes of 2675200; logits 0\.0 off the reference"
    sizes = [int(found) for found in re.findall(line, done.stdout, re.MULTILINE)]
    assert sizes == [700672 if precision == "int8" else 1337600] * 5, done.stdout
