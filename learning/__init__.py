"""What is needed to train for real: policy networks, advantages, PPO, IMPALA."""

from learning.gae import gae
from learning.impala import IMPALA
from learning.networks import ActionSpec, CategoricalPolicy, GaussianPolicy, Policy, make_critic, make_policy
from learning.ppo import PPO
from learning.vtrace import vtrace

__all__ = [
    "IMPALA",
    "PPO",
    "ActionSpec",
    "CategoricalPolicy",
    "GaussianPolicy",
    "Policy",
    "gae",
    "make_critic",
    "make_policy",
    "vtrace",
]
