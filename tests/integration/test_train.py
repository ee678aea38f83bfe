"""train.py as a process of its own, with real workers."""

import csv
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import run_program
from stopping import left_of

from collectors import Collector
from collectors.errors import ConfigError
from learning import checkpoint
from learning.reporting.files import FolderError
from learning.trained import load_policy, play

ROOT = Path(__file__).resolve().parents[2]
# Without the reset steps of a native vector environment, batches have exactly `frames_per_batch` frames.
QUICK = ("logger=none", "num_envs=4", "frames_per_batch=256", "++env.kwargs.vectorization_mode=sync")
FILES = ("config.yaml", "metrics.jsonl", "summary.json", "learning_curve.png", "sync_latency.png", "checkpoint.pt")


def command(folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *QUICK, f"hydra.run.dir={folder}", *overrides]


def run(folder: Path, *overrides: str, status: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    options = [*QUICK, f"hydra.run.dir={folder}", *overrides]
    return run_program(ROOT / "train.py", *options, folder=folder, status=status, **more)


def started(folder: Path, *overrides: str, cwd: Path = ROOT, **more: str) -> subprocess.Popen[str]:
    """A run without an end, in a session of its own, that has told of its first frames."""
    endless = ("total_frames=100_000_000", "stop_when_solved=false")
    process = subprocess.Popen(
        command(folder, *endless, *overrides), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, cwd=cwd, env={**os.environ, **more},
    )  # fmt: skip
    assert process.stdout is not None and any(line.startswith("frames ") for line in process.stdout)
    return process


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """A sweep of short runs, one with each of some backends: the run's folder, and what it printed."""
    sweep, schemes = tmp_path_factory.mktemp("sweep"), ["shared_mem", "multiprocess", "none"]
    options = ["total_frames=1024", "seed=3", "algorithm.lr=1e-3", "env.id=gymnasium:CartPole-v1"]
    options += [f"hydra.sweep.dir={sweep}"]
    done = run(sweep, f"weight_sync={','.join(schemes)}", *options, "-m")
    folders = sorted(path.parent for path in sweep.glob("*/summary.json"))
    assert [summary(folder)["weight_sync"]["scheme"] for folder in folders] == schemes
    printed = re.split(r"(?m)^\[.*\]\[HYDRA\] \t#\d : ", done.stdout)
    return dict(zip(schemes, zip(folders, printed[1:], strict=True), strict=True))


@pytest.mark.parametrize("scheme", ["shared_mem", "multiprocess", "none"])
def test_a_run_leaves_everything_in_its_folder(runs: dict[str, tuple[Path, str]], scheme: str) -> None:
    folder, printed = runs[scheme]
    assert all((folder / name).stat().st_size > 0 for name in (*FILES, "ledger.json"))
    told = summary(folder)
    assert (told["status"], told["solved"], told["frames"], told["seed"]) == ("finished", False, 1024, 3)
    assert "env.id=gymnasium:CartPole-v1" in told["overrides"]  # as it was typed
    assert told["weight_sync"]["scheme"] == scheme
    assert len(rows(folder)) == 4
    assert told["worker_failures"] == {}
    assert [row["state"] for row in told["ledger"]] == ["alive"] * 2 * (scheme != "none")
    assert "\x1b" not in printed  # no terminal, no control characters
    assert "frames 1,024/1,024" in printed
    assert re.search(r"^worker processes: \d+, \d+$", printed, re.MULTILINE)


@pytest.mark.parametrize("scheme", ["shared_mem", "multiprocess"])
def test_every_batch_is_followed_by_an_update_with_its_cost(runs: dict[str, tuple[Path, str]], scheme: str) -> None:
    folder, _ = runs[scheme]
    sync = summary(folder)["weight_sync"]
    assert sync["updates"] == 4
    assert sync["version"] == rows(folder)[-1]["version"] == 5  # the first weights were version 1
    assert 0 < sync["latency_us"]["p50"] <= sync["latency_us"]["p95"] <= sync["latency_us"]["max"]
    assert summary(folder)["staleness"]["mean"] == 0
    assert sync["over_plain_copy"] > 1


def test_the_control_reports_that_no_update_arrived(runs: dict[str, tuple[Path, str]]) -> None:
    folder, printed = runs["none"]
    sync = summary(folder)["weight_sync"]
    assert (sync["updates"], sync["latency_us"]["p50"]) == (0, None)
    assert "Nothing reached the workers" in printed
    assert "did not learn" in printed


def test_the_scheme_does_not_change_the_training(runs: dict[str, tuple[Path, str]]) -> None:
    """Synchronous collection from one seed is the same run; without an update it is another after the first batch."""
    learnt = {
        scheme: [(row["episode_returns"], row["learning"]) for row in rows(folder)]
        for scheme, (folder, _) in runs.items()
    }
    assert learnt["shared_mem"] == learnt["multiprocess"]
    assert learnt["shared_mem"][0] == learnt["none"][0]
    assert learnt["shared_mem"][1] != learnt["none"][1]


@pytest.mark.slow
def test_a_run_resumes_where_another_ended(runs: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    """And one that was finished has nothing left to do."""
    first = runs["shared_mem"][0]
    done = run(tmp_path, f"resume={first}", "total_frames=1024,1536", f"hydra.sweep.dir={tmp_path}", "-m")
    finished, second = sorted(path.parent for path in tmp_path.glob("*/summary.json"))
    assert (summary(finished)["frames"], rows(finished)) == (1024, rows(first))
    assert summary(finished)["verdict"].startswith("Nothing was left to do: ") and "total_frames=" in done.stdout
    told, after, history = summary(first), summary(second), rows(second)
    assert (after["frames"], after["seed"]) == (1536, 3)
    assert after["resumed_from"]["frames"] == told["frames"]
    assert after["episodes"] >= told["episodes"]
    assert history[: len(rows(first))] == rows(first)
    assert [row["frames"] for row in history] == sorted(row["frames"] for row in history)
    assert "lr: 0.001" in (second / "config.yaml").read_text()


GPU_RUNS = (
    [],
    ["policy=lstm", "algorithm.decoupled=true"],
    ["algorithm=impala", "collector=multi_async"],
    ["staleness=2", "weight_sync=multiprocess"],
    ["env=pendulum", "env.normalize_observations=true", "env.rewards=normalized", "weight_sync=distributed"],
)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", GPU_RUNS)
def test_a_learner_on_a_gpu(options: list[str], tmp_path: Path) -> None:
    run(tmp_path, "device=cuda", "total_frames=2048", *options)
    assert summary(tmp_path)["weight_sync"]["updates"] > 2
    for device in ("cuda", "cpu"):
        (tmp_path / device).mkdir()
        run(tmp_path / device, f"resume={tmp_path}", f"device={device}", "total_frames=3072")
        assert summary(tmp_path / device)["frames"] >= 3072


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("device=nonsense", ""),
        pytest.param("device=cuda:99", "", marks=pytest.mark.slow),
        ("weight_sync=sharedmem", "there is no such option; did you mean 'shared_mem'?; there are: cuda, "),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(override: str, said: str, tmp_path: Path) -> None:
    refused = run(tmp_path, override, status=1)
    (line,) = refused.stderr.splitlines()
    assert refused.stdout == "" and line.startswith(f"train.py: {override}: {said}")


def test_a_trained_policy_is_loaded(runs: dict[str, tuple[Path, str]], tmp_path: Path) -> None:
    folder = runs["shared_mem"][0]
    policy, make_env = load_policy(folder)
    saved = checkpoint.load(folder)["learner"]["policy"]
    assert all(tensor.equal(saved[name]) for name, tensor in policy.state_dict().items()) and not policy.training
    with Collector(make_env, policy, frames_per_batch=10) as collector:
        assert next(collector).shape == (10,)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = (folder / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("- 64", "- 32"))
    with pytest.raises(checkpoint.CheckpointError, match=r"does not fit config\.yaml: .*size mismatch"):
        load_policy(tmp_path)
    (tmp_path / "config.yaml").write_text(config.replace("learning.MLP", "mine.Wide"))
    with pytest.raises(ConfigError, match=r"^policy\._target_=mine\.Wide: there is no module 'mine' on sys\.path"):
        load_policy(tmp_path)
    for damaged in (config[: config.index("env:") + 6], "a: [", "- 1", ""):
        (tmp_path / "config.yaml").write_text(damaged)
        with pytest.raises(FolderError, match=r"config\.yaml is damaged: "):
            load_policy(tmp_path)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(FolderError, match=r"config\.yaml could not be read"):
        load_policy(tmp_path)


@pytest.mark.slow
def test_a_trained_policy_plays(
    runs: dict[str, tuple[Path, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs["shared_mem"][0]
    played = run_program(ROOT / "scripts" / "evaluate.py", str(folder), "--episodes", "3", folder=tmp_path)
    assert re.match(r"return [\d.,]+ ± [\d.,]+ over 3 episodes \(lowest .*\), most likely actions", played.stdout)
    refused = run_program(ROOT / "scripts" / "evaluate.py", str(tmp_path), folder=tmp_path, status=1)
    assert "config.yaml could not be read" in refused.stderr
    evaluate = runpy.run_path(str(ROOT / "scripts" / "evaluate.py"))["main"]
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "resume.yaml").write_text("a: [")
    with pytest.raises(SystemExit, match=r"^evaluate\.py: .*resume\.yaml is damaged: "):
        evaluate(tmp_path)
    with pytest.raises(SystemExit, match=r"^evaluate\.py: no episode ended in 3 frames; --max-frames raises"):
        evaluate(folder, max_frames=3)  # the pole falls after 8 steps at the earliest
    evaluate(folder, episodes=500, max_frames=1000)
    assert re.search(r" over [1-9]\d* of 500 episodes \(", capsys.readouterr().out)


@pytest.mark.slow
def test_other_collectors_and_actions(tmp_path: Path) -> None:
    sweep = ["collector=single,multi_async", "env=pendulum", f"hydra.sweep.dir={tmp_path}", "-m"]
    run(tmp_path, "total_frames=2048", *sweep)
    told = [summary(path.parent) for path in tmp_path.glob("*/summary.json")]
    assert len(told) == 2
    assert all(one["weight_sync"]["updates"] >= 4 and one["episodes"] > 0 for one in told)


def test_cartpole_is_solved(tmp_path: Path) -> None:
    run(tmp_path, "num_envs=16", "frames_per_batch=1024", "++env.kwargs.vectorization_mode=auto")
    told = summary(tmp_path)
    assert (told["status"], told["solved"]) == ("solved", True)
    assert told["episode_return_mean_100"] >= 475
    assert told["frames"] < 200_000


@pytest.mark.slow  # for SIGHUP and SIGTERM: tests/unit/test_loop.py
def test_ctrl_c_stops_it_cleanly(tmp_path: Path, long_path: Path) -> None:
    process = started(tmp_path, TMPDIR=str(long_path))
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted" in out and "continue it by: python train.py resume=" in out
    told = summary(tmp_path)
    assert told["status"] == "interrupted"
    assert told["frames"] == rows(tmp_path)[-1]["frames"] > 0
    assert (tmp_path / "checkpoint.pt").exists()
    assert not left_of(process.pid)


@pytest.mark.slow
def test_a_run_that_ends_at_a_second_ctrl_c_leaves_no_temporary_folder(tmp_path: Path, short_path: Path) -> None:
    process = started(tmp_path, "algorithm.compile=false", TMPDIR=str(short_path))
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=250)
    assert process.returncode == 130
    assert not left_of(process.pid, 30.0)
    for left in short_path.iterdir():  # the second Ctrl-C may come while the fork server's folder is being removed
        assert left.name.startswith("pymp-") and not list(left.iterdir())


FAILING = """
import gymnasium, os, signal
from gymnasium.envs.classic_control import CartPoleEnv

class Failing(CartPoleEnv):
    steps = 0
    def step(self, action):
        self.steps += 1
        if self.steps == 100:
            raise ArithmeticError("the pole is gone")
        return super().step(action)

gymnasium.register("Failing-v0", entry_point=Failing, max_episode_steps=500)
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_in_one_line_that_names_the_file(tmp_path: Path) -> None:
    """The kernel refuses files beyond a size as it refuses those for which there is no room."""
    often = ["frames_per_batch=32", "total_frames=100_000", "policy.hidden=[8]", "algorithm.epochs=1"]
    done = subprocess.run(
        ["prlimit", "--fsize=100000", *command(tmp_path, *often)],
        capture_output=True, text=True, timeout=250, cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # Python would keep compiled modules that were cut off
    )  # fmt: skip
    told = f"train.py: {tmp_path}/metrics.jsonl could not be written: File too large\n"
    assert (done.returncode, done.stderr) == (1, told)
    assert summary(tmp_path)["status"] == "failed" and (tmp_path / "checkpoint.pt").exists()


def test_the_report_of_a_sweep_has_the_figures_of_the_runs(runs: dict[str, tuple[Path, str]]) -> None:
    sweep = runs["none"][0].parent
    page, (_, printed) = (sweep / "sweep.html").read_text(), runs["none"]  # which was the last
    for folder, _ in runs.values():
        told = summary(folder)
        assert f"<td>{told['frames_per_second']:,.0f}</td>" in page
        assert told["weight_sync"]["scheme"] in printed
    assert page.count("data:image/png;base64,") == 2
    assert all((sweep / name).stat().st_size > 10_000 for name in ("sweep_returns.png", "sweep_latency.png"))


@pytest.mark.slow
def test_a_sweep_reports_each_failed_run_in_the_terminal_and_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    sweep = ["env.id=CartPol-v1,failing:Failing-v0", f"hydra.sweep.dir={tmp_path}", "-m"]
    done = run(tmp_path, *sweep, status=1, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    folders = ("0-CartPol-v1-shared_mem-s0", "1-Failing-v0-shared_mem-s0")
    for folder, reason in zip(folders, ("env.id=CartPol-v1", "ArithmeticError: the pole"), strict=True):
        assert f"ERROR: run {folder[0]} ({folder}): " in done.stderr
        assert reason in done.stderr and reason in (tmp_path / folder / "train.log").read_text()
    assert "worker " in done.stderr
    assert summary(tmp_path / folder)["status"] == "failed" and (tmp_path / folder / "checkpoint.pt").exists()


def test_a_report_of_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    main = runpy.run_path(str(ROOT / "scripts" / "report.py"))["main"]
    with pytest.raises(SystemExit, match=rf"^report\.py: no run has ended in {tmp_path}"):
        main(tmp_path)


def test_a_link_to_the_script_finds_its_configs_and_a_runs_config_path_is_refused_with_the_way(tmp_path: Path) -> None:
    (tmp_path / "linked.py").symlink_to(ROOT / "train.py")
    options = [*QUICK, "weight_sync=none", "total_frames=256", "hydra.run.dir=run"]
    done = run_program(tmp_path / "linked.py", *options, folder=tmp_path, PYTHONPATH=str(ROOT))
    options = ["--config-path", str(tmp_path / "run" / ".hydra"), "--config-name", "config"]
    done = run_program(ROOT / "train.py", *options, folder=tmp_path, status=1)
    assert done.stderr.startswith("train.py: --config-path: to repeat a run") and "resume=" in done.stderr


# --- a policy, an environment, a callback and an algorithm of a user's own ---


SHORT = ("logger=none", "num_envs=4", "frames_per_batch=256", "total_frames=512", "hydra.run.dir=first")
NORMALIZED = ("+env.normalize_observations=true", "+env.rewards=normalized")


def train(folder: Path, *arguments: str) -> None:
    run_program(ROOT / "train.py", *arguments, folder=folder, PYTHONPATH=str(ROOT))


def evaluate(folder: Path, *options: str) -> str:
    """Return what evaluate.py says of the run in `folder` / "second", a line."""
    script = ROOT / "scripts" / "evaluate.py"
    done = run_program(script, "second", "--episodes", "1", *options, folder=folder, status=None, PYTHONPATH=str(ROOT))
    said = done.stdout + done.stderr
    assert said.count("\n") == 1
    return said


@pytest.mark.slow  # tests/unit has its parts
def test_an_experiment_of_ones_own_trains_and_resumes_with_its_statistics_and_its_callback(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    for path, text in re.findall(r"\n`(my/\S+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL):  # as they are copied
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    train(tmp_path, "--config-dir", "my", "experiment=mine", *SHORT, *NORMALIZED)
    train(tmp_path, "--config-dir", "my", "resume=first", "total_frames=1024", "hydra.run.dir=second")
    counts = []
    for run, frames in (("first", ["256", "512"]), ("second", ["768", "1024"])):
        rows = (tmp_path / run / "rows.csv").read_text().splitlines()
        assert [row.partition(",")[0] for row in rows] == ["frames", *frames]
        state = checkpoint.load(tmp_path / run)
        assert any("layers" in name for name in state["learner"]["policy"])
        name = "network.normalizer.moments.0.count"
        statistics = state["learner"]["policy"][name], state["rewards"]["moments.count"]
        counts.append((*map(int, statistics), state["progress"]["frames"]))
    assert counts == [(512, 512, 512), (1024, 1024, 1024)]
    assert evaluate(tmp_path).startswith("return ")  # with the config folder of the run
    (tmp_path / "my").rename(tmp_path / "moved")
    assert evaluate(tmp_path).startswith(
        "evaluate.py: policy._target_=mine.Wide: there is no module 'mine' on sys.path"
    )
    assert evaluate(tmp_path, "--config-dir", "moved").startswith("return ")


COPIED = """
import copy
import random
import numpy
import torch
from learning import PPO

class Copied(PPO):
    def __init__(self, policy, critic, **settings):
        super().__init__(copy.deepcopy(policy), critic, **settings)

    def update(self, batch):
        draws = {"python": random.random(), "numpy": numpy.random.rand()}
        with torch.no_grad():
            now = self.policy.distribution(batch["observation"]).log_prob(batch["action"])
        assert torch.allclose(now, batch["action_log_prob"], atol=1e-3), "another policy has acted"
        return super().update(batch) | draws
"""


@pytest.mark.slow
def test_an_algorithm_of_ones_own_draws_from_seeded_generators_and_its_policy_acts_also_after_a_resume(
    tmp_path: Path,
) -> None:
    (tmp_path / "copied.py").write_text(COPIED)
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "copied.yaml").write_text("_target_: copied.Copied\nlr: 0.01\n")
    own = ("--config-dir", str(tmp_path))
    train(tmp_path, *own, "algorithm=copied", *SHORT, "seed=3")
    first = json.loads((tmp_path / "first" / "metrics.jsonl").read_text().splitlines()[0])["learning"]
    assert (first["python"], first["numpy"]) == (random.Random(3).random(), np.random.RandomState(3).rand())
    train(tmp_path, *own, "resume=first", "total_frames=1024", "hydra.run.dir=second")


# --- what strangers hit in train.py: points of issue 57, each by its input ---


SMALL = ("total_frames=512", "num_workers=1")


@pytest.mark.parametrize(("encoding", "output"), [("ascii", "output"), ("utf-8", "/dev/full")])
def test_57_9_output_is_no_reason_to_stop(encoding: str, output: str, tmp_path: Path) -> None:
    with open(tmp_path / output, "w") as stdout:  # an absolute path stays as it is
        options = {"env": {**os.environ, "PYTHONIOENCODING": encoding}, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command(tmp_path / "run", *SMALL), cwd=tmp_path, stdout=stdout, timeout=250, **options)
    assert (done.returncode, summary(tmp_path / "run")["status"]) == (0, "finished"), done.stderr
    assert done.stderr.count("No space left on device") == (output == "/dev/full")


def test_57_10_and_16_signals_to_the_process_group_and_a_resume_in_another_folder(tmp_path: Path) -> None:
    process = started(first := tmp_path / "first", "collector.on_worker_failure=restart", cwd=tmp_path)
    os.killpg(process.pid, signal.SIGUSR1)
    while not (first / "checkpoint.pt").exists():
        assert process.poll() is None and process.stdout is not None and process.stdout.readline()
    for _ in range(2):
        os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 143, err
    assert "resume=first" in out
    told = summary(first)
    assert (told["status"], told["worker_failures"]) == ("interrupted", {})
    again = command(tmp_path / "again", "resume=first", "hydra.job.chdir=true", f"total_frames={told['frames'] + 1}")
    done = subprocess.run(again, timeout=250, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "again")["resumed_from"]["frames"] == told["frames"]


def test_57_14_help_fits_a_screen_and_names_every_option(tmp_path: Path) -> None:
    done = run_program(ROOT / "train.py", "--help", folder=tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 120, done.stderr
    for group in ("weight_sync", "env", "env/mujoco", "env/atari", "policy", "logger", "experiment"):
        assert {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")} <= set(re.findall(r"\w+", done.stdout))
    everything = run_program(ROOT / "train.py", "env=taxi", "--help-all", folder=tmp_path).stdout
    assert "init_random_frames: 0" in everything and "Taxi" in everything
    assert not {"auto_register", "policy_weights", "per_worker_weights", "chaos"} & set(re.findall(r"\w+", everything))


def test_57_11_a_run_evaluates_its_policy_and_the_best_one_can_be_filmed(tmp_path: Path) -> None:
    logger = "tensorboard" if find_spec("tensorboard") else "none"
    done = run_program(
        ROOT / "train.py", f"hydra.run.dir={tmp_path}", f"logger={logger}", "num_envs=4", "total_frames=1024",
        "frames_per_batch=256", *SMALL[1:], "evaluate_every=300", "evaluate_episodes=2", folder=tmp_path,
    )  # fmt: skip
    tables = [(tmp_path / f"{one}.csv").read_text().splitlines() for one in ("evaluation", "metrics")]
    evaluated, rows = (list(csv.DictReader(lines)) for lines in tables)
    versions = {row["frames"]: row["version"] for row in rows}
    assert done.stdout.count("evaluated after ") == len(evaluated) == 4  # past 300, 600, 900, 1200
    assert all(versions[one["frames"]] == one["version"] for one in evaluated)
    assert float(rows[0]["learning/loss_policy"]) and (logger == "none" or [*tmp_path.glob("events*")])
    policy, make_env = load_policy(tmp_path / "best")
    best = play(make_env, policy, 2, sample=False, seed=0, max_frames=2000)
    assert sum(best) / 2 == max(float(one["return"]) for one in evaluated)
    if logger == "none":
        missing = run_program(ROOT / "train.py", "logger=tensorboard", folder=tmp_path, status=1)
        assert missing.stderr == "train.py: logger: TensorBoardLogger: No module named 'tensorboard'\n"
    film = run_program(
        ROOT / "scripts" / "evaluate.py", str(tmp_path / "best"), "--episodes=2", "--video=film", folder=tmp_path,
        status=None, PYTHONPATH=str(ROOT), SDL_VIDEODRIVER="dummy",
    )  # fmt: skip
    if find_spec("moviepy") is None:
        assert film.returncode == 1 and film.stderr.startswith("evaluate.py: MoviePy is not installed")
    else:
        assert film.returncode == 0 and len(list((tmp_path / "film").iterdir())) == 2, film.stderr
