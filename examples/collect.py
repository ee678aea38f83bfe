"""Train CartPole with a collector: it starts the workers, collects batches from them, and delivers the weights.

python examples/collect.py
"""

import torch

from collectors import GymEnv, MultiSyncCollector
from learning import MLP, PPO, make_actor_critic
from wsync import SharedMemWeightSyncScheme

FRAMES = 10_240


def make_env() -> GymEnv:
    """Return the environments of one worker: eight, stepped together."""
    return GymEnv("CartPole-v1", num_envs=8)


if __name__ == "__main__":
    torch.set_num_threads(1)
    env, scheme = make_env(), SharedMemWeightSyncScheme(acknowledge="published")
    policy, critic = make_actor_critic(MLP, env.observation_spec["observation"], env.action_spec)
    learner = PPO(policy, critic)

    with MultiSyncCollector(
        [make_env, make_env],  # one worker for each
        policy,
        frames_per_batch=1024,
        total_frames=FRAMES,
        weight_sync_schemes={"policy": scheme},
    ) as collector:
        for batch in collector:  # a TensorDict
            learner.update(batch)
            collector.update_policy_weights_()
            returns = batch["next", "episode_return"][batch["next", "done"]]  # of the episodes that have ended
            print(f"version {batch['policy_version'].min()}: mean return {returns.mean():.1f}")
    summary = scheme.metrics.summary()
    print(f"{summary['updates']} updates, median latency {summary['latency_us']['p50']:.0f} µs")
