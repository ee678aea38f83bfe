"""RLlib's PPO on CartPole with two env runners; wsync carries the weights to them.

python examples/libraries/rllib.py
"""

from functools import partial

from ray.rllib.algorithms.ppo import PPOConfig

import wsync
from wsync.integrations.rllib import WsyncCallback

if __name__ == "__main__":
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2)
        .learners(num_learners=0)  # the learner is in this process
        .callbacks(partial(WsyncCallback, wsync.SharedMemWeightSyncScheme()))
    )
    algorithm = config.build_algo()
    for _ in range(3):
        result = algorithm.train()
        versions = algorithm.env_runner_group.foreach_env_runner(lambda one: one.wsync.version, local_env_runner=False)
        print(f"return {result['env_runners']['episode_return_mean']:.0f}, env runners have versions {versions}")
    algorithm.stop()
