"""Ray actors that need no code of wsync: the trainer has them join, and drives both ends.

python examples/ray_actors.py
"""

import ray
import torch
from torch import nn

from wsync import RayWeightSyncScheme


@ray.remote(num_cpus=0)
class Actor:
    """Any actor with a model as an attribute."""

    def __init__(self):
        self.policy = nn.Linear(4, 2)

    def act(self, observation):
        """Return the policy's output; updates are installed between two forwards, also during a long call."""
        with torch.no_grad():
            return self.policy(observation)


if __name__ == "__main__":
    ray.init(logging_level="error", log_to_driver=False)
    actors = [Actor.remote() for _ in range(2)]
    policy, scheme = nn.Linear(4, 2), RayWeightSyncScheme()
    scheme.init_on_sender("policy", model=policy, actors=actors)  # "policy": the model's path in each actor
    scheme.connect()

    observation = torch.ones(4)
    for _ in range(3):
        nn.init.normal_(policy.weight)  # in place of training
        print(scheme.send())
        outputs = ray.get([actor.act.remote(observation) for actor in actors])
        assert all(torch.equal(output, policy(observation)) for output in outputs)
    print("both actors act with the trainer's weights")

    scheme.shutdown()
    ray.shutdown()
