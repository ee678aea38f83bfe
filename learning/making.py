"""Making a policy and its critic around a network of any kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from collectors.environments.specs import ACTION_MASK, Spec, SpecTree
from learning.encoders import feature_size, linear
from learning.networks import Critic, Network, Policy, policy_for
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
        raise ValueError(
            f"{ACTION_MASK} has {mask.shape.numel()} elements, and the action has {sum(action_spec.options)} options"
        )
    trunk = make_network(observation_spec)
    if isinstance(trunk, RecurrentNetwork):
        critic_trunk = trunk if shared else make_network(observation_spec)
        assert isinstance(critic_trunk, RecurrentNetwork)
        if not isinstance(getattr(trunk, "state_size", None), int):
            raise ValueError(f"{type(trunk).__name__} needs the attribute state_size, an int: the length of its state")
        return _recurrent(trunk, critic_trunk, observation_spec, action_spec, initial_std, normalizer)
    size = feature_size(trunk, observation_spec)
    policy = policy_for(
        action_spec, lambda outputs: Network(trunk, linear(size, outputs, 0.01), normalizer), initial_std
    )
    critic_trunk = trunk if shared else make_network(observation_spec)
    return policy, Critic(Network(critic_trunk, linear(size, 1, 1.0), normalizer))


def _recurrent(
    actor: RecurrentNetwork,
    critic_trunk: RecurrentNetwork,
    observation_spec: SpecTree,
    action_spec: Spec,
    initial_std: float,
    normalizer: ObservationNormalizer | None,
) -> tuple[RecurrentPolicy, RecurrentCritic]:
    size = feature_size(actor, observation_spec)
    trunk, parts = actor, (nn.Identity(), nn.Identity())
    if critic_trunk is not actor:
        trunk, parts = SideBySide(actor, critic_trunk), (FeatureSlice(0, size), FeatureSlice(size, 2 * size))

    def head(part: nn.Module, outputs: int, gain: float) -> nn.Module:
        return nn.Sequential(part, linear(size, outputs, gain))

    actions = policy_for(action_spec, lambda outputs: head(parts[0], outputs, 0.01), initial_std)
    policy = RecurrentPolicy(Network(trunk, actions.network, normalizer), actions)
    return policy, RecurrentCritic(Network(trunk, head(parts[1], 1, 1.0), normalizer))
