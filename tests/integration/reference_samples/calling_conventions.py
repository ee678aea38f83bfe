"""A `MultiCollector` and each documented call of `update_policy_weights_`, two models at once included."""

from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from collectors import GymEnv, MultiCollector
from wsync import SharedMemWeightSyncScheme


def main():
    env = GymEnv("CartPole-v1")
    observed, chosen = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    critic = TensorDictModule(nn.Linear(observed, 1), in_keys=["observation"], out_keys=["value"])
    actor = TensorDictModule(nn.Linear(observed, chosen), in_keys=["observation"], out_keys=["action"])
    both = TensorDictSequential(critic, actor)
    names = {"critic": "module[0]", "actor": "module[1]"}
    collector = MultiCollector(
        sync=True,
        create_env_fn=[lambda: GymEnv("CartPole-v1")] * 3,
        policy=both,
        frames_per_batch=192,
        total_frames=10000,
        weight_sync_schemes={name: SharedMemWeightSyncScheme(strategy="tensordict") for name in names.values()},
    )
    actor_weights, critic_weights = TensorDict.from_module(actor).data, TensorDict.from_module(critic).data
    for number, batch in enumerate(collector):
        assert batch["value"].shape[-1] == 1
        if number == 0:
            collector.update_policy_weights_(weights=actor_weights, model_id=names["actor"])
        elif number == 1:
            collector.update_policy_weights_(
                weights_dict={names["actor"]: actor_weights, names["critic"]: critic_weights}
            )
        else:
            break
    versions = {name: scheme.version for name, scheme in collector.weight_sync_schemes.items()}
    collector.shutdown()
    assert versions == {"module[0]": 2, "module[1]": 3}, versions

    collector = MultiCollector(
        sync=True,
        create_env_fn=[lambda: GymEnv("CartPole-v1")] * 3,
        policy=actor,
        frames_per_batch=192,
        total_frames=10000,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme(strategy="tensordict")},
    )
    for batch in collector:
        version = batch["policy_version"].max().item()
        collector.update_policy_weights_()
        collector.update_policy_weights_(actor)
        collector.update_policy_weights_(actor_weights)
        collector.update_policy_weights_(policy=actor)
        collector.update_policy_weights_(weights=actor_weights, model_id="policy")
        if version == 11:
            break
    assert collector.policy_version == 16
    collector.shutdown()
    print("delivered")


if __name__ == "__main__":
    main()
