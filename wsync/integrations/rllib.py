"""RLlib (new API stack): env runners take weights by a scheme of wsync, not by the object store.

config.callbacks(partial(WsyncCallback, wsync.SharedMemWeightSyncScheme()))
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ray.rllib.algorithms.impala import IMPALA  # pyright: ignore[reportMissingImports]
from ray.rllib.callbacks.callbacks import RLlibCallback  # pyright: ignore[reportMissingImports]
from ray.rllib.core import DEFAULT_MODULE_ID  # pyright: ignore[reportMissingImports]

import wsync

_log = logging.getLogger(__name__)


def _join(scheme: wsync.WeightSyncScheme, runner: Any) -> list[str]:
    """In an env runner: take updates from now on. Return the names of the module's weights."""
    scheme.init_on_receiver("policy", model=runner.module, worker_idx=runner.worker_index - 1)
    scheme.connect(wait=False)
    runner.wsync = scheme
    return [*runner.module.state_dict()]


class WsyncCallback(RLlibCallback):
    """Has the remote env runners of an algorithm with one agent updated by ``scheme``; evaluation is left as it is.

    The learner is local (``num_learners=0``): its module is read in place. An env runner that has died is left out with
    a warning, until RLlib has restarted it. IMPALA and APPO, which send weights in a way of their own, are a
    ``ValueError``.
    """

    def __init__(self, scheme: wsync.WeightSyncScheme) -> None:
        super().__init__()
        self.scheme = scheme
        scheme.bind = False  # RLlib may write to a module, when it restores a checkpoint

    def on_algorithm_init(self, *, algorithm: Any, **_: Any) -> None:
        group, learner = algorithm.env_runner_group, algorithm.learner_group._learner
        if learner is None or not group.num_remote_workers() or algorithm.config.is_multi_agent:
            raise ValueError("wsync carries one agent's weights from a local learner (num_learners=0) to env runners")
        if isinstance(algorithm, IMPALA):
            raise ValueError(f"{type(algorithm).__name__} sends weights in a way of its own: wsync cannot replace it")
        self.scheme.init_on_sender("policy", num_workers=group.num_remote_workers())
        names = group.foreach_env_runner(partial(_join, self.scheme), local_env_runner=False)[0]

        def acting() -> dict[str, Any]:
            whole = learner.module[DEFAULT_MODULE_ID].state_dict()
            return {name: whole[name] for name in names}  # env runners have no critic

        def send(*_: Any, to_worker_indices: list[int] | None = None, **__: Any) -> None:
            weights = acting()
            try:
                self.scheme.send(weights, to_worker_indices and [index - 1 for index in to_worker_indices])
            except wsync.WorkerDied as error:
                _log.warning("%s", error)
            if group.local_env_runner is not None and to_worker_indices is None:
                group.local_env_runner.module.load_state_dict(weights)

        self.scheme.connect(weights=acting())
        group.sync_weights = send

    def on_env_runners_recreated(
        self, *, env_runner_group: Any, env_runner_indices: list[int], is_evaluation: bool, **_: Any
    ) -> None:
        if is_evaluation:
            return
        join = partial(_join, self.scheme)
        env_runner_group.foreach_env_runner(join, local_env_runner=False, remote_worker_ids=env_runner_indices)
        for index in env_runner_indices:
            self.scheme.readmit(index - 1)
