"""Play episodes with the policy that a run of train.py has trained, and print their returns.

python scripts/evaluate.py outputs/<date>/<run>                          # most likely actions
python scripts/evaluate.py outputs/<date>/<run> --episodes 100 --sample  # actions as in training
python scripts/evaluate.py outputs/<date>/<run> --config-dir my          # the run's, if it is elsewhere now
python scripts/evaluate.py outputs/<date>/<run> --video videos           # a video of each episode

The number after ± is the standard deviation. ``learning.trained.load_policy`` loads the policy in a program of yours.
"""

from __future__ import annotations

import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import gymnasium
import numpy as np
import typer
from gymnasium.wrappers import RecordVideo

from collectors import GymEnv
from collectors.config import EnvConfig, sample
from collectors.errors import ConfigError
from collectors.output import keep_output_harmless
from learning.checkpoint import CheckpointError
from learning.reporting.files import FolderError
from learning.resuming import config_folders_of, read_yaml
from learning.summary import return_text
from learning.trained import load_policy, play


def recorded(folder: Path, video: Path, episodes: int) -> GymEnv:
    """Return an environment of the run in `folder`; the folder `video` gets its first `episodes`."""
    config = EnvConfig(**read_yaml(folder / "config.yaml")["env"])
    (config.kwargs if config.make is None else config.make)["render_mode"] = "rgb_array"
    env = RecordVideo(sample(config).stepper.driver.env, str(video), episode_trigger=lambda one: one < episodes)
    return GymEnv(env, max_frames_per_traj=config.max_episode_steps)


def main(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="The folder of the run.")],
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes")] = 20,
    sample: Annotated[bool, typer.Option(help="Sample actions instead of taking the most likely ones")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the environment, and of the samples")] = 0,
    config_dir: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="With modules of your own; by default the run's")
    ] = None,
    max_frames: Annotated[
        int, typer.Option(min=1, help="Ends with the batch of 200 frames that reaches this")
    ] = 1_000_000,
    video: Annotated[
        Path | None, typer.Option(file_okay=False, help="A folder for a video of each episode (needs moviepy)")
    ] = None,
) -> None:
    """Play episodes in one environment of the run, and print their returns."""
    try:
        folders = config_folders_of(folder) if config_dir is None else [str(config_dir.resolve())]
        sys.path += [os.getcwd(), *folders]  # settings may name modules there, as in train.py
        policy, make_env = load_policy(folder)
        make_env = make_env if video is None else recorded(folder, video, episodes)
    except (CheckpointError, ConfigError, FolderError, gymnasium.error.DependencyNotInstalled) as error:
        sys.exit("\n".join([f"evaluate.py: {error}", *getattr(error, "__notes__", ())]))
    own_seed = int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])  # not the episodes of training
    returns = play(make_env, policy, episodes, sample=sample, seed=own_seed, max_frames=max_frames)
    if not returns:
        sys.exit(f"evaluate.py: no episode ended in {max_frames:,} frames; --max-frames raises this limit")
    spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
    of = "" if len(returns) == episodes else f" of {episodes}"
    shown = partial(return_text, solved_at=max(map(abs, returns)))  # all with the same number of decimals
    actions = "sampled" if sample else "most likely"
    print(
        f"return {shown(statistics.mean(returns))} ± {shown(spread)} over {len(returns)}{of} episodes "
        f"(lowest {shown(min(returns))}, highest {shown(max(returns))}), {actions} actions"
    )


if __name__ == "__main__":
    keep_output_harmless()
    typer.run(main)
