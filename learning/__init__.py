"""What is needed to train for real: policy networks, advantages, PPO."""

from learning.gae import gae
from learning.networks import ActionSpec, CategoricalPolicy, GaussianPolicy, Policy, make_critic, make_policy
from learning.ppo import PPO

__all__ = [
    "PPO",
    "ActionSpec",
    "CategoricalPolicy",
    "GaussianPolicy",
    "Policy",
    "gae",
    "make_critic",
    "make_policy",
]
