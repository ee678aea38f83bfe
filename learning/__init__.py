"""What is needed to train for real: policy networks, advantages, PPO."""

from learning.encoders import CNN, MLP
from learning.gae import gae
from learning.networks import (
    CategoricalPolicy,
    Critic,
    GaussianPolicy,
    MultiCategoricalPolicy,
    Policy,
    make_actor_critic,
    make_critic,
    make_policy,
)
from learning.ppo import PPO

__all__ = [
    "CNN",
    "MLP",
    "PPO",
    "CategoricalPolicy",
    "Critic",
    "GaussianPolicy",
    "MultiCategoricalPolicy",
    "Policy",
    "gae",
    "make_actor_critic",
    "make_critic",
    "make_policy",
]
