"""Three worker processes fed through shared memory, updated with a TensorDict after every batch."""

from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from collectors import GymEnv, MultiSyncDataCollector
from wsync import SharedMemWeightSyncScheme


def main():
    env = GymEnv("CartPole-v1")
    network = nn.Linear(env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1])
    actor = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    collector = MultiSyncDataCollector(
        create_env_fn=[lambda: GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1")],
        policy=actor,
        frames_per_batch=192,
        total_frames=1920,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme(strategy="tensordict", auto_register=True)},
    )
    for number, batch in enumerate(collector, start=1):
        assert batch["policy_version"].unique().tolist() == [number]
        collector.update_policy_weights_(TensorDict.from_module(actor))
    collector.shutdown()
    print(collector.frames)


if __name__ == "__main__":
    main()
