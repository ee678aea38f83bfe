"""Making a policy and its critic: around a network of any kind, or around an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from collectors.environments.specs import ACTION_MASK, Spec, SpecTree
from learning.encoders import MLP, feature_size, linear
from learning.networks import CategoricalPolicy, Critic, GaussianPolicy, Network, Policy, policy_for
from learning.normalization import ObservationNormalizer
from learning.recurrent import FeatureSlice, RecurrentCritic, RecurrentNetwork, RecurrentPolicy, SideBySide


def make_actor_critic(
    make_network: Callable[[SpecTree], nn.Module],
    observation_spec: SpecTree,
    action_spec: Spec,
    initial_std: float = 1.0,
    shared: bool = False,
    normalizer: ObservationNormalizer | None = None,
) -> tuple[Policy | RecurrentPolicy, nn.Module]:
    """Make a policy and its critic around a network of any kind.

    Args:
        make_network: makes a module that maps observations to features, for the spec of an observation.
        observation_spec: the environment's.
        action_spec: the environment's; it decides about the distribution of actions.
        initial_std: standard deviation of a continuous policy at the start, in units of half the action range.
        shared: whether one network serves both; otherwise each has its own.
        normalizer: the normalizer of observations, for both; None: observations are not normalized.

    Raises:
        ValueError: the network or the action mask does not suit, or a continuous action has no bounds.
    """
    mask = observation_spec.get(ACTION_MASK) if isinstance(observation_spec, Mapping) else None
    if isinstance(mask, Spec) and action_spec.options and mask.shape != (sum(action_spec.options),):
        sizes = f"{mask.shape.numel()} elements, and the action has {sum(action_spec.options)} options"
        raise ValueError(f"{ACTION_MASK} has {sizes}")
    trunk = make_network(observation_spec)
    if isinstance(trunk, RecurrentNetwork):
        if not isinstance(getattr(trunk, "state_size", None), int):
            raise ValueError(f"{type(trunk).__name__} needs the attribute state_size, an int: the length of its state")
        parts: Sequence[nn.Module] = (nn.Identity(), nn.Identity())
        critic_trunk = trunk if shared else make_network(observation_spec)
        size = feature_size(trunk, observation_spec)
        if isinstance(critic_trunk, RecurrentNetwork) and not shared:
            trunk, parts = SideBySide(trunk, critic_trunk), (FeatureSlice(0, size), FeatureSlice(size, 2 * size))
        heads = policy_for(action_spec, lambda n: nn.Sequential(parts[0], linear(size, n, 0.01)), initial_std)
        critic_head = nn.Sequential(parts[1], linear(size, 1, 1.0))
        policy = RecurrentPolicy(Network(trunk, heads.network, normalizer), heads)
        return policy, RecurrentCritic(Network(trunk, critic_head, normalizer))
    size = feature_size(trunk, observation_spec)
    policy = policy_for(action_spec, lambda n: Network(trunk, linear(size, n, 0.01), normalizer), initial_std)
    critic_trunk = trunk if shared else make_network(observation_spec)
    return policy, Critic(Network(critic_trunk, linear(size, 1, 1.0), normalizer))


def make_policy(
    observation: int | SpecTree,
    action_spec: Spec,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    initial_std: float = 1.0,
) -> CategoricalPolicy | GaussianPolicy:
    """Make a policy with an :class:`MLP`; `observation` is the spec of an observation, or the length of a flat one.

    The action's spec decides about the distribution of actions: see :func:`make_actor_critic` for the rest, and errors.
    """
    spec = Spec(torch.Size([observation]), torch.float32) if isinstance(observation, int) else observation
    trunk = MLP(spec, hidden, activation)
    return policy_for(action_spec, lambda n: Network(trunk, linear(feature_size(trunk, spec), n, 0.01)), initial_std)
