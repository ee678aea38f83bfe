"""TorchRL's own collector with two processes; wsync carries the weights.

python examples/libraries/torchrl_collector.py
"""

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor

import wsync
from wsync.integrations.torchrl import TorchRLScheme


def make_env():
    """Return one environment."""
    return GymEnv("CartPole-v1")


def make_policy():
    """Return an actor that samples its actions."""
    logits = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(logits, in_keys=["logits"], distribution_class=OneHotCategorical)


if __name__ == "__main__":
    policy = make_policy()
    scheme = TorchRLScheme(wsync.SharedMemWeightSyncScheme())
    collector = MultiSyncCollector(
        [make_env, make_env], policy, frames_per_batch=64, total_frames=640, weight_sync_schemes={"policy": scheme}
    )
    for batch in collector:
        print(f"{batch.numel()} frames, of which {batch['action'][..., 0].float().mean():.0%} to the left")
        with torch.no_grad():
            policy[0].module.bias += torch.tensor([0.5, 0.0])  # in place of training
        collector.update_policy_weights_()  # raises WorkerDied for a worker that has died
    print(scheme.scheme.metrics)
    collector.shutdown()
