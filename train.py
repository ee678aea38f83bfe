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
import signal
import sys
import tempfile
import threading
from importlib.util import find_spec
from multiprocessing import forkserver, util

NEEDED = ("gymnasium", "hydra", "matplotlib", "rich")

if missing := [name for name in NEEDED if find_spec(name) is None]:
    sys.exit(f"not installed: {', '.join(missing)}: pip install -e '.[train]' installs what train.py needs")


def start_fork_server() -> None:
    """Start the server that workers are forked from: it imports its modules while this process imports the ones below.

    The server ignores Ctrl-C. Until ``run_hydra``, Ctrl-C ends this process without a traceback.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the server
    forkserver.set_forkserver_preload(["collectors.worker", "learning"])
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > 70:  # the path of the server's socket has at most 107 bytes: unix(7)
        tempfile.tempdir = "/tmp"
    util.get_temp_dir()
    tempfile.tempdir = usual
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, signal.SIG_DFL if handler is signal.default_int_handler else handler)


if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":  # torchrun: ranks above 0 fork no workers
    start_fork_server()

from contextlib import ExitStack, nullcontext
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import collectors.config
from collectors.distributed import is_worker, join_trainer
from collectors.env_config import env_config, env_factory, solved_at, task_of
from collectors.errors import ConfigError
from collectors.rollouts.rollout import seed_generators
from collectors.targets import instantiate_setting
from learning.config import (
    choice_in_words,
    describe_error,
    env_option,
    facts,
    failure_advice,
    line_prefix,
    resolved,
    run_hydra,
)
from learning.delay import WeightDelay
from learning.hints import hints
from learning.loop import Goal, Training
from learning.making import learner_device
from learning.normalization import RewardNormalizer
from learning.options import TrainConfig
from learning.reporting.console import ConsoleReporter, worker_pids
from learning.reporting.files import SUMMARY, Pictures, RunFiles
from learning.reporting.guarded import Guarded
from learning.resuming import SettingsFiles, config_folders, resume_command
from learning.run import own_folder, reported_errors, resumed_seed, stop_requests
from learning.summary import objective_of
from learning.validation import actor_critic, check_parts, network_settings

log = logging.getLogger(__name__)


def train(cfg: TrainConfig, settings_files: SettingsFiles, folder: Path) -> tuple[int, float]:
    """Run one training into `folder`; return the exit status, and the objective of a sweeper (``cfg.objective``)."""
    torch.set_num_threads(cfg.threads)
    seed_generators(cfg.seed)
    scheme = instantiate_setting("weight_sync", cfg.weight_sync)
    collectors.config.check(cfg.collector, scheme, cfg.num_workers)

    cfg.env = env_config(cfg.env)
    network, settings = network_settings(cfg.policy)
    policy, critic, normalizer = actor_critic(
        instantiate_setting("policy", network, _partial_=True), cfg.env, choice_in_words(cfg), env_option(), **settings
    )
    device = learner_device(cfg.device)
    learner = instantiate_setting("algorithm", cfg.algorithm, policy.to(device), critic.to(device))
    logger = instantiate_setting("logger", cfg.logger)
    callbacks = [instantiate_setting(f"callbacks[{i}]", one) for i, one in enumerate(cfg.callbacks)]
    check_parts(learner, logger, callbacks, cfg.sync_each)
    for hint in hints(cfg, learner, HydraConfig.get().runtime.choices["env"] if env_option() is None else None):
        log.warning(hint)

    goal = Goal(cfg.total_frames, solved_at(cfg.env), cfg.stop_when_solved)
    delay = WeightDelay(cfg.staleness)
    training = Training(learner, scheme, goal, folder, cfg.checkpoint_every, delay, cfg.sync_each)
    training.device, training.facts = device, facts(cfg)
    training.task, training.observations = task_of(cfg.env), normalizer
    training.rewards = RewardNormalizer(cfg.env.rewards, getattr(learner, "gamma", 0.99))
    if cfg.resume is not None:
        training.resume(Path(cfg.resume))
    seed = resumed_seed(cfg.seed, training.progress.frames)
    seed_generators(seed)
    acting = delay.acting_policy(learner.policy)
    acting = acting if device.type == "cpu" else copy.deepcopy(acting).cpu()
    console = console_of(cfg, training)
    training.reporters = [
        RunFiles(training.resumed_from, training.progress.frames),
        settings_files,
        console,
        Pictures(),
        Guarded("logger", logger),
        *(Guarded("callback", one) for one in callbacks),
    ]

    with stop_requests() as stop, failure_advice(cfg.collector), ExitStack() as running:
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
            monkey = instantiate_setting("chaos", cfg.chaos, _partial_=True)(collector)
            training.chaos = running.enter_context(monkey).counts
        except (OSError, ValueError) as error:  # an unknown address, or settings that contradict each other
            what = f"the collector and its scheme '{scheme.name}' cannot be set up: "
            raise ConfigError(f"{what if isinstance(error, OSError) else ''}{error}") from error
        collector.set_seed(seed)
        collector.load_state_dict({"frames": training.progress.frames, "policy_version": training.progress.version})
        summary = training.run(collector, stop, OmegaConf.to_container(OmegaConf.structured(cfg)))
    return stop.exit_status, objective_of(summary, cfg.objective)


def console_of(cfg: TrainConfig, training: Training) -> ConsoleReporter:
    """Return what shows the run in the terminal."""
    scheme, run = training.scheme, HydraConfig.get()
    return ConsoleReporter(
        f"{cfg.env.id}, {scheme.name}, {cfg.num_workers} × {cfg.num_envs} environments, seed {cfg.seed}",
        cfg.total_frames,
        solved_at=training.goal.solved_at,
        resumed=training.resumed_in_words,
        resume_command=resume_command(__file__, run) if scheme.sends_weights else "",
        prefix=line_prefix(run),
    )


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> float:
    """Check what Hydra composed, and train; return the objective, for a sweeper."""
    run = HydraConfig.get()
    job = run.job.num if run.mode is RunMode.MULTIRUN else None
    folder = Path(run.runtime.output_dir)
    with reported_errors(folder, describe_error, job=job), nullcontext() if job is None else own_folder(folder):
        cfg, settings_files = resolved(composed, run)
        status, objective = train(cfg, settings_files, folder)
        # Given NaN, Optuna's sweeper ends with an error of its own, also where failed runs are allowed.
        if not status and math.isnan(objective) and job is not None and run.runtime.choices["hydra/sweeper"] != "basic":
            raise ConfigError(f"objective={cfg.objective} is null in {SUMMARY}: the run has no figure for the sweeper")
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
    run_hydra(main)
