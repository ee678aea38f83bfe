"""Train a policy on what workers gather with copies of it, and tell what carrying the weights to them costs.

    python train.py weight_sync=shared_mem env=cartpole num_workers=2
    python train.py -m weight_sync=shared_mem,multiprocess seed=0,1,2
    python train.py resume=outputs/<date>/<run>

The composition root: the only file that knows wsync, collectors, learning and Hydra.
"""

import os
import signal
import time

STARTED = time.perf_counter()  # before the imports: they are most of the time until the first update

# Ctrl-C while modules are imported just ends: nothing has begun that could be finished, or told about.
INTERRUPT = signal.getsignal(signal.SIGINT)
if __name__ == "__main__" and INTERRUPT is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the fork server inherits

# The workers' fork server makes its imports while this process makes its own; ranks that torchrun starts need none.
if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload(["collectors.workers.worker", "learning"])
    forkserver.ensure_running()

if signal.getsignal(signal.SIGINT) is not INTERRUPT:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import logging
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NoReturn

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import collectors.config
import learning.checks
import learning.config
import wsync.config
from collectors import GymEnv
from collectors.distributed import is_worker, join_trainer
from learning import make_critic, make_policy
from learning.checkpoint import CheckpointError
from learning.complaints import one_line, seen_by
from learning.config import ConfigError, TrainConfig, WandbConfig
from learning.loop import Goal, Training
from learning.ppo import Diverged
from learning.reporting.console import ConsoleReporter
from learning.reporting.files import FolderError, Pictures, RunFiles, writing
from learning.seeding import seed_from
from learning.stop import StopRequest
from wsync import WeightSyncError

EXPECTED = (
    ConfigError,
    CheckpointError,
    Diverged,
    FolderError,
    HydraException,
    OmegaConfBaseException,
    WeightSyncError,
)

log = logging.getLogger(__name__)

for package in (wsync.config, collectors.config, learning.config):
    package.register_configs()


def train(cfg: TrainConfig, folder: Path, started: float) -> int:
    """Run one training into `folder`; returns the exit status."""
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)

    scheme = instantiate(cfg.weight_sync)

    make_env = partial(
        GymEnv, cfg.env.id, cfg.num_envs, max_frames_per_traj=cfg.env.max_episode_steps, **cfg.env.kwargs
    )
    with closing(collectors.config.sample(cfg.env)) as env:
        observation_dim = learning.checks.observation_dim(cfg.env.id, env.observation_spec["observation"])
        action_spec = env.action_spec
        learning.checks.check_action(cfg.env.id, action_spec)
    policy = make_policy(observation_dim, action_spec, cfg.policy.hidden, cfg.policy.activation, cfg.policy.initial_std)
    critic = make_critic(observation_dim, cfg.policy.hidden, cfg.policy.activation)
    learner = instantiate(cfg.algorithm, policy, critic)

    goal = Goal(cfg.total_frames, collectors.config.solved_at(cfg.env), cfg.stop_when_solved)
    training = Training(learner, scheme, goal, folder, checkpoint_every=cfg.checkpoint_every, started=started)
    training.facts |= {"env": cfg.env.id, "seed": cfg.seed, "num_workers": cfg.num_workers, "num_envs": cfg.num_envs}
    overrides = learning.config.as_typed(HydraConfig.get().overrides.task)
    training.facts["overrides"] = overrides  # a sweep's report tells runs apart by them
    seed = cfg.seed
    if cfg.resume is not None:
        training.resume(Path(cfg.resume))
        seed = seed_from(cfg.seed, training.progress.frames)
        torch.manual_seed(seed)

    with StopRequest() as stop, ExitStack() as running:
        try:
            collector = instantiate(cfg.collector, _partial_=True)(
                [make_env] * cfg.num_workers,
                policy,
                frames_per_batch=cfg.frames_per_batch,
                weight_sync_schemes={"policy": scheme},
            )
            running.enter_context(collector)
            training.chaos = running.enter_context(instantiate(cfg.chaos, _partial_=True)(collector)).counts
        except (OSError, ValueError) as error:  # an address that there is not, or settings that contradict another
            raise ConfigError(str(error)) from error
        collector.set_seed(seed)
        collector.load_state_dict({"frames": training.progress.frames})
        title = f"{cfg.env.id}, {scheme.name}, {cfg.num_workers} × {cfg.num_envs} environments, seed {cfg.seed}"
        training.reporters = [
            RunFiles(training.resumed_from, training.progress.frames),
            ConsoleReporter(title, cfg.total_frames),
            Pictures(),
            instantiate(cfg.logger, _convert_="all"),
        ]
        try:
            training.run(collector, stop, OmegaConf.to_container(OmegaConf.structured(cfg)))
        except KeyboardInterrupt:
            if not stop.requested:
                raise
            running.close()
            leave_at_once(stop.exit_status)
    return stop.exit_status


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> None:
    """Check what Hydra composed, write it into the run's folder, and train."""
    run = HydraConfig.get()
    sweep = run.mode is RunMode.MULTIRUN
    started = time.perf_counter() if sweep else STARTED
    folder = Path(run.runtime.output_dir)
    try:
        composed = learning.config.resumed(composed, run.overrides.task, run.runtime.choices)
        cfg = OmegaConf.to_object(composed)
        assert isinstance(cfg, TrainConfig)
        learning.config.check(cfg)
        collectors.config.check(cfg.collector._target_, cfg.weight_sync._target_, cfg.num_workers)
        if sweep and isinstance(cfg.logger, WandbConfig):
            cfg.logger.group = cfg.logger.group or "-".join(Path(run.sweep.dir).parts[-2:])
        with writing(folder / "config.yaml"):
            OmegaConf.save(OmegaConf.structured(cfg), folder / "config.yaml")
        status = train(cfg, folder, started)
    except Exception as error:
        expected = isinstance(error, EXPECTED)
        if sweep:  # Hydra goes on with the other jobs, and raises the first error at the end: no other one is told
            log.error("%s: %s", folder.name, reason(error) if expected else error, exc_info=not expected)
        elif expected:
            raise SystemExit(complaint(error)) from error
        raise
    if status:
        raise SystemExit(status)


def leave_at_once(status: int) -> NoReturn:
    """End this process, after a second signal: what others do at its exit may wait for a server (wandb's does)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def complaint(error: BaseException) -> str:
    """Say in one line who complains, and of what."""
    return f"train.py: {reason(error)}"


def reason(error: BaseException) -> str:
    """Say in one line what is wrong, or what went wrong; in one more for each thing that failed after it."""
    hydras = isinstance(error, HydraException | OmegaConfBaseException)
    said = one_line(error, learning.config.settings()) if hydras else str(error)
    return "\n".join([said, *getattr(error, "__notes__", ())])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, INTERRUPT)
    if is_worker():  # torchrun starts all ranks alike: those above 0 collect
        sys.exit(join_trainer())
    verbose = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise what it would print, so that it can be said in one line
    try:
        sys.argv[1:] = learning.config.stored_overrides(sys.argv[1:])
        main()
    except BaseException as error:
        if INTERRUPT is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C waits for no report
        learning.config.SweepReport.make_up()  # of the runs that came to an end before, or beside one that failed
        if isinstance(error, KeyboardInterrupt):  # where no run was under way that could be asked to stop
            sys.exit(128 + signal.SIGINT)
        of_a_folder = isinstance(error, OSError) and not seen_by(main, error)  # which Hydra could not make
        if verbose or not (isinstance(error, EXPECTED) or of_a_folder):
            raise
        sys.exit(complaint(error))
