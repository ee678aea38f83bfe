"""RLlib's ``sync_weights`` with wsync, and RLlib's own, in turn, to the same env runners. Needs ``.[libraries]``.

    python scripts/bench_rllib.py 2 8 32            # with so many env runners
    python scripts/bench_rllib.py 2 --hidden 1024   # two layers of 1,024: 4 MiB

Both wait until every env runner has the weights, which is checked each time. *Copied* is what passed the loopback
interface, by these processes or others: messages, and weights that do not go through shared memory.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import ray
import torch
import typer
from ray.rllib.algorithms.ppo import PPOConfig  # pyright: ignore[reportMissingImports]
from ray.rllib.env.env_runner_group import EnvRunnerGroup  # pyright: ignore[reportMissingImports]
from rich.console import Console
from rich.table import Table

import wsync
from wsync.integrations.rllib import WsyncCallback

COPIED = Path("/sys/class/net/lo/statistics/tx_bytes")


def bias(module: Any) -> float:
    """Return a number of the weights, which each update changes."""
    return next(one for name, one in module.named_parameters() if name.endswith("bias"))[0].item()


def measure(runners: int, hidden: int, rounds: int) -> list[list[float]]:
    """Return the median milliseconds of an update by each way, and the KiB copied."""
    callback: Any = partial(WsyncCallback, wsync.SharedMemWeightSyncScheme())
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=runners).learners(num_learners=0)
    config = config.rl_module(model_config={"fcnet_hiddens": [hidden, hidden]})
    algorithm: Any = config.callbacks(callback).build_algo()
    group, module = algorithm.env_runner_group, algorithm.learner_group._learner.module["default_policy"]
    own = partial(EnvRunnerGroup.sync_weights, group, from_worker_or_learner_group=algorithm.learner_group)
    ways = {"wsync": group.sync_weights, "RLlib": partial(own, inference_only=True, timeout_seconds=60.0)}
    found = {name: list[tuple[float, float]]() for name in ways}
    for number in range(rounds):
        for name, sync in list(ways.items())[:: 1 if number % 2 else -1]:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1e-3)
            copied, began = int(COPIED.read_text()), time.perf_counter()
            sync()
            seconds = time.perf_counter() - began
            found[name].append((seconds * 1e3, (int(COPIED.read_text()) - copied) / 1024))
            assert {*group.foreach_env_runner(lambda one: bias(one.module))} == {bias(module)}, f"{name}: not installed"
    algorithm.stop()
    return [[statistics.median(column) for column in zip(*one, strict=True)] for one in found.values()]


def main(
    runners: Annotated[list[int], typer.Argument()], hidden: int = 64, rounds: Annotated[int, typer.Option(min=1)] = 40
) -> None:
    """Show a table."""
    table = Table("env runners", "wsync ms", "RLlib ms", "ratio", "wsync KiB copied", "RLlib KiB copied")
    for count in runners:
        ray.init(num_cpus=count + 2, log_to_driver=False, include_dashboard=False, object_store_memory=1 << 29)
        (ours, copied), (theirs, their_copied) = measure(count, hidden, rounds)
        cells = (f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}", f"{copied:,.0f}", f"{their_copied:,.0f}")
        table.add_row(str(count), *cells)
        ray.shutdown()
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
