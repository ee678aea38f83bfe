"""Train a policy on batches from workers that act with copies of it, and measure what sending the weights costs.

    python train.py weight_sync=shared_mem env=cartpole num_workers=2
    python train.py -m weight_sync=shared_mem,multiprocess seed=0,1,2
    python train.py resume=outputs/<date>/<run>
    python train.py --config-dir my weight_sync=mine     # my/weight_sync/mine.yaml: _target_: mymodule.MyScheme

The settings are in ``conf/``; ``python train.py --help`` prints them.
"""

import copy
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
from importlib.util import find_spec
from multiprocessing import forkserver, util

NEEDED = ("gymnasium", "hydra", "matplotlib", "pydantic", "rich")

if missing := [name for name in NEEDED if find_spec(name) is None]:
    sys.exit(f"not installed: {', '.join(missing)}: pip install -e '.[train]' installs what train.py needs")


def start_fork_server() -> None:
    """Start the server that workers are forked from: it imports its modules while this process imports the ones below.

    The server ignores signals to the process group, and imports what this process would: not from the current folder
    first. Until ``run_hydra``, Ctrl-C ends this process without a traceback.
    """
    to_group = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = {one: signal.signal(one, signal.SIG_IGN) for one in to_group}  # inherited by the server
    forkserver.set_forkserver_preload(["collectors.worker", "learning"])
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > 70:  # the path of the server's socket has at most 107 bytes: unix(7)
        tempfile.tempdir = "/tmp"
    util.get_temp_dir()
    tempfile.tempdir = usual
    environment = dict(os.environ)
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(environment)
    for one, handler in handlers.items():
        signal.signal(one, signal.SIG_DFL if handler is signal.default_int_handler else handler)


if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":  # torchrun: ranks above 0 fork no workers
    if sys.stdout.isatty():
        print("starting …", flush=True)  # importing takes seconds
    start_fork_server()

from contextlib import ExitStack
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf

import collectors.config
from collectors.config import env_config, env_factory, instantiate_setting, solved_at
from collectors.distributed import is_worker, join_trainer
from collectors.errors import ConfigError
from collectors.rollouts.rollout import seed_generators
from learning.config import CONF, TRACEBACKS, describe_error, folders_named, line_prefix, resolved, run_hydra
from learning.loop import Goal, StopRequest, Training, WeightDelay, delays, resumed_seed
from learning.normalization import RewardNormalizer
from learning.options import TrainConfig, repays_compiling
from learning.recurrent import RecurrentPolicy
from learning.reporting import Reporter
from learning.reporting.console import ConsoleReporter, worker_pids
from learning.reporting.files import METRICS, RunFiles
from learning.resuming import SETTINGS, config_folders, resume_command
from learning.summary import objective_of
from learning.trained import Evaluation, actor_critic

log = logging.getLogger(__name__)


def train(cfg: TrainConfig, folder: Path) -> tuple[int, float]:
    """Run one training into `folder`; return the exit status, and the objective of a sweeper (``cfg.objective``)."""
    torch.set_num_threads(cfg.threads)
    seed_generators(cfg.seed)
    scheme = instantiate_setting("weight_sync", cfg.weight_sync)
    collectors.config.check(cfg.collector, scheme, cfg.num_workers)

    cfg.env = env_config(cfg.env)
    policy, critic, normalizer = actor_critic(cfg.policy, cfg.env)
    try:
        device = torch.empty(0, device=cfg.device).device
    except (AssertionError, RuntimeError) as error:  # an AssertionError: PyTorch was built without CUDA
        raise ConfigError(f"device={cfg.device}: {str(error).splitlines()[0]}") from error
    if getattr(cfg.algorithm, "compile", False) is None:
        cfg.algorithm.compile = repays_compiling(cfg) and not isinstance(policy, RecurrentPolicy)
    learner = instantiate_setting("algorithm", cfg.algorithm, policy.to(device), critic.to(device))
    logger = instantiate_setting("logger", cfg.logger)
    callbacks = [instantiate_setting(f"callbacks[{i}]", one) for i, one in enumerate(cfg.callbacks)]
    for reporter in (logger, *callbacks):
        if not isinstance(reporter, Reporter):
            raise ConfigError(f"logger and callbacks derive from learning.reporting.Reporter, not so {reporter!r}")

    goal = Goal(cfg.total_frames, solved_at(cfg.env), cfg.stop_when_solved)
    recorded = None if cfg.staleness_from is None else Path(to_absolute_path(cfg.staleness_from))
    delay = WeightDelay(delays(cfg.staleness, cfg.staleness_spread, recorded, cfg.seed))
    training = Training(learner, scheme, goal, folder, cfg.checkpoint_every, delay, cfg.sync_each)
    run = HydraConfig.get()
    overrides = [one.replace("\\", "") for one in run.overrides.task]  # a sweep's launcher escapes colons, for example
    training.facts = {"env": cfg.env.id, "seed": cfg.seed, "num_workers": cfg.num_workers, "num_envs": cfg.num_envs}
    training.facts["overrides"] = overrides
    training.device, training.observations = device, normalizer
    training.rewards = RewardNormalizer(cfg.env.rewards, getattr(learner, "gamma", 0.99))
    if cfg.resume is not None:
        training.resume(Path(to_absolute_path(cfg.resume)))
    seed = resumed_seed(cfg.seed, training.progress.frames)
    seed_generators(seed)
    acting = delay.acting_policy(learner.policy)
    acting = acting if device.type == "cpu" else copy.deepcopy(acting).cpu()
    console = console_of(cfg, training)
    settings = {"overrides": list(run.overrides.task), "config_folders": folders_named(run)}
    if cfg.evaluate_every is not None:
        callbacks.insert(0, Evaluation(cfg.evaluate_every, cfg.evaluate_episodes, console.say))
    training.reporters = [
        RunFiles(training.resumed_from, training.progress.frames, {SETTINGS: settings}),
        console,
        logger,
        *callbacks,
    ]

    for one in (logger, *callbacks):
        one.policy, one.make_env = lambda: copy.deepcopy(learner.policy).cpu().eval(), env_factory(cfg.env, None)
    with StopRequest() as stop, ExitStack() as running:
        stop.add_callback(console.note_stop_request)
        try:
            collector = instantiate_setting("collector", cfg.collector, _partial_=True)(
                [env_factory(cfg.env, cfg.num_envs)] * cfg.num_workers,
                acting,
                frames_per_batch=cfg.frames_per_batch,
                weight_sync_schemes={"policy": scheme},
            )
            running.enter_context(collector)
            console.worker_pids = worker_pids(collector)
        except (OSError, ValueError) as error:  # an unknown address, or settings that contradict each other
            what = f"the collector and its scheme '{scheme.name}' cannot be set up: "
            raise ConfigError(f"{what if isinstance(error, OSError) else ''}{error}") from error
        collector.set_seed(seed)
        if training.goal.outcome(training.progress) is None:
            state = {"frames": training.progress.frames, "policy_version": training.progress.version}
            collector.load_state_dict(state)  # sends the weights again, with the number of their version
        else:
            scheme.continue_from(training.progress.version)  # nothing is left to do
        summary = training.run(collector, stop, OmegaConf.to_container(OmegaConf.structured(cfg)))
    return stop.exit_status, objective_of(summary, cfg.objective)


def console_of(cfg: TrainConfig, training: Training) -> ConsoleReporter:
    """Return what shows the run in the terminal."""
    scheme, run = training.scheme, HydraConfig.get()
    before, resumed = training.progress, ""
    if training.resumed_from is not None:
        resumed = f"resumed from {training.resumed_from} at {before.frames:,} frames, version {before.version:,}"
    continues = resume_command(__file__, run.overrides.task, folders_named(run)) if scheme.sends_weights else ""
    return ConsoleReporter(
        f"{cfg.env.id}, {scheme.name}, {cfg.num_workers} × {cfg.num_envs} environments, seed {cfg.seed}",
        cfg.total_frames,
        solved_at=training.goal.solved_at,
        resumed=resumed,
        resume_command=continues,
        compiles=bool(getattr(training.learner, "compile", False)),
        prefix=line_prefix(run),
    )


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(composed: DictConfig) -> float:
    """Check what Hydra composed, and train; return the objective, for a sweeper."""
    run = HydraConfig.get()
    swept, folder = run.mode is RunMode.MULTIRUN, Path(run.runtime.output_dir)
    try:
        if swept and (folder / METRICS).exists():  # of another run of the sweep, or of an earlier start of this job
            raise ConfigError(f"{folder} has a run already: continue it by resume={folder}, or see hydra.sweep.subdir")
        status, objective = train(resolved(composed, run), folder)
        # Given NaN, Optuna's sweeper ends with an error of its own, also where failed runs are allowed.
        if not status and math.isnan(objective) and swept and run.runtime.choices["hydra/sweeper"] != "basic":
            raise ConfigError(f"objective={composed.objective} is null: the run has no figure for the sweeper")
    except KeyboardInterrupt:  # the second one: `run_hydra` ends the process without exit handlers
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)  # of the fork server
        raise
    except Exception as error:  # of any class; raised again, or in one line
        message = describe_error(error)
        if swept:  # Hydra goes on with the other runs, and raises only the first error, at the end
            log.error("run %d (%s): %s", run.job.num, folder.name, message or error, exc_info=message is None)
        elif message is not None and not TRACEBACKS:  # to other errors, Hydra adds a line
            raise SystemExit(f"train.py: {message}") from error
        raise
    if status:
        raise SystemExit(status)
    return objective


if __name__ == "__main__":
    # Settings may name modules of the current folder and of --config-dir: policy._target_, env.id, …
    folders = [str(folder.resolve()) for folder in config_folders(sys.argv[1:])]
    if folders and not os.path.isdir(folders[0]):
        sys.exit(f"train.py: there is no folder {folders[0]}: see --config-dir")
    sys.path += [os.getcwd(), *folders]
    if folders:  # for the jobs of submitit, which are interpreters of their own
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *folders]))
    if is_worker():  # torchrun starts all ranks alike: those above 0 collect
        status = join_trainer()
        exit_timer = threading.Timer(5.0, os._exit, [status])  # threads that an environment has started may not end
        exit_timer.daemon = True
        exit_timer.start()
        sys.exit(status)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by start_fork_server
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_hydra(main)
