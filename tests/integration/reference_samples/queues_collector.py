"""Three worker processes that copy each update, with a scheme made without arguments."""

from tensordict.nn import TensorDictModule
from torch import nn

from collectors import GymEnv, MultiSyncCollector
from wsync import MultiProcessWeightSyncScheme


def main():
    env = GymEnv("CartPole-v1")
    network = nn.Linear(env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1])
    actor = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    scheme = MultiProcessWeightSyncScheme()
    collector = MultiSyncCollector(
        create_env_fn=[lambda: GymEnv("CartPole-v1")] * 3,
        policy=actor,
        frames_per_batch=100,
        total_frames=1000,
        weight_sync_schemes={"policy": scheme},
    )
    for batch in collector:
        assert batch["policy_version"].unique().tolist() == [scheme.version]
        collector.update_policy_weights_()
    collector.shutdown()
    print(collector.frames)


if __name__ == "__main__":
    main()
