"""What is needed to train for real: policy networks, advantages, PPO, IMPALA."""

from learning.actor_critic import ActorCritic
from learning.advantages import gae, vtrace
from learning.encoders import CNN, MLP
from learning.impala import IMPALA
from learning.making import make_actor_critic, make_policy
from learning.networks import CategoricalPolicy, Critic, GaussianPolicy, MultiCategoricalPolicy, Policy
from learning.ppo import PPO
from learning.recurrent import RNN, RecurrentNetwork, RecurrentPolicy

__all__ = [
    "CNN", "IMPALA", "MLP", "PPO", "RNN", "ActorCritic", "CategoricalPolicy", "Critic", "GaussianPolicy",
    "MultiCategoricalPolicy", "Policy", "RecurrentNetwork", "RecurrentPolicy", "gae", "make_actor_critic",
    "make_policy", "vtrace",
]  # fmt: skip
