"""What is needed to train for real: policy networks, advantages, PPO, IMPALA."""

from learning.encoders import CNN, MLP
from learning.gae import gae
from learning.impala import IMPALA
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
from learning.vtrace import vtrace

__all__ = [
    "CNN",
    "IMPALA",
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
    "vtrace",
]
