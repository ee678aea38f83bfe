"""One collector in the trainer's process, with a scheme, updated with state dicts every few batches."""

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from collectors import GymEnv, SyncDataCollector
from wsync import MultiProcessWeightSyncScheme


def main():
    env = GymEnv("CartPole-v1")
    network = nn.Linear(env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1])
    actor = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    collector = SyncDataCollector(
        create_env_fn=lambda: GymEnv("CartPole-v1"),
        policy=actor,
        frames_per_batch=64,
        total_frames=1000,
        weight_sync_schemes={"policy": MultiProcessWeightSyncScheme(strategy="state_dict")},
    )
    frames = versions = 0
    for number, batch in enumerate(collector):
        frames, versions = frames + batch.numel(), batch["policy_version"].max().item()
        if number % 10 == 0:
            with torch.no_grad():
                network.bias.add_(1.0)
            collector.update_policy_weights_(actor.state_dict())
    collector.shutdown()
    assert frames >= 1000 and versions == 3, (frames, versions)
    print(frames)


if __name__ == "__main__":
    main()
