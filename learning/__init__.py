"""What is needed to train for real: policy networks, advantages, PPO, IMPALA."""

from learning.actor_critic import ActorCritic
from learning.encoders import CNN, MLP
from learning.gae import gae
from learning.impala import IMPALA
from learning.making import make_actor_critic
from learning.networks import (
    CategoricalPolicy,
    Critic,
    GaussianPolicy,
    MultiCategoricalPolicy,
    Policy,
    make_critic,
    make_policy,
)
from learning.ppo import PPO
from learning.recurrent import RNN, RecurrentNetwork, RecurrentPolicy
from learning.vtrace import vtrace

__all__ = [
    "CNN",
    "IMPALA",
    "MLP",
    "PPO",
    "RNN",
    "ActorCritic",
    "CategoricalPolicy",
    "Critic",
    "GaussianPolicy",
    "MultiCategoricalPolicy",
    "Policy",
    "RecurrentNetwork",
    "RecurrentPolicy",
    "gae",
    "make_actor_critic",
    "make_critic",
    "make_policy",
    "vtrace",
]
