"""Recurrent networks, and policies and critics with one: ``policy=lstm`` and ``policy=gru``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from typing_extensions import override

from collectors.environments.specs import SpecTree
from collectors.rollouts.sampled import greedy
from learning.encoders import CNN, MLP, Observation, feature_size, leaves, suits_convolutions
from learning.networks import Network, Policy, action_mask

STATE = "recurrent_state"


class RecurrentNetwork(nn.Module, ABC):
    """A network with a state, such as an LSTM; the base class of your own ones.

    Attributes:
        state_size: length of the state, a vector of floats; zero at the start of an episode.
    """

    state_size: int

    @abstractmethod
    def forward(self, observation: Observation, state: Tensor) -> tuple[Tensor, Tensor]:
        """Map observations ``[*B, *obs]`` and states ``[*B, S]`` to features ``[*B, F]`` and new states ``[*B, S]``."""

    def sequence(self, observation: Observation, state: Tensor, is_init: Tensor) -> Tensor:
        """Run `R` sequences of `T` steps; return features ``[R, T, F]``, with gradients through time.

        Of the states ``[R, T, S]``, only those at the start of a sequence are used. An episode starts, with a state of
        zero, where the bool `is_init` ``[R, T]`` is true.
        """
        features, current = [], state[:, 0]
        for t in range(is_init.shape[1]):
            current = current.masked_fill(is_init[:, t, None], 0.0)
            feature, current = self(observation[:, t], current)
            features.append(feature)
        return torch.stack(features, 1)


class RNN(RecurrentNetwork):
    """An LSTM or a GRU on the features of a `CNN` if there is an image that is large enough for it, else of an `MLP`.

    Args:
        observation_spec: the spec of an observation.
        cell: ``lstm`` or ``gru``.
        size: number of features.
        hidden: widths of the layers of the `MLP`: for observations without such an image.
        activation: the activation of these layers.
        features: number of features of each image in the `CNN`: for observations with such an image.

    Raises:
        ValueError: an unknown `cell` or `activation`.
    """

    def __init__(
        self, observation_spec: SpecTree, cell: str = "lstm", size: int = 128, hidden: Sequence[int] = (64,),
        activation: str = "tanh", features: int = 512,
    ) -> None:  # fmt: skip
        super().__init__()
        cells: dict[str, type[nn.LSTM | nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}
        if cell not in cells:
            raise ValueError(f"unknown cell {cell!r}: one of {', '.join(cells)}")
        images = any(suits_convolutions(spec) for _, spec in leaves(observation_spec))
        self.encoder = CNN(observation_spec, features) if images else MLP(observation_spec, hidden, activation)
        self.cell = cells[cell](feature_size(self.encoder, observation_spec), size, batch_first=True).float()
        for name, weight in self.cell.named_parameters():
            nn.init.zeros_(weight) if "bias" in name else nn.init.orthogonal_(weight)
        self.state_size = 2 * size if cell == "lstm" else size

    @override
    def forward(self, observation: Observation, state: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.encoder(observation)
        features, new = self._run(encoded.reshape(-1, 1, encoded.shape[-1]), state.reshape(-1, self.state_size))
        return features.reshape(*encoded.shape[:-1], -1), new.reshape(state.shape)

    def sequence(self, observation: Observation, state: Tensor, is_init: Tensor) -> Tensor:
        """Run each part of a sequence that is of one episode as a row, all rows at once.

        The rows are padded to the longest: on a CPU, PyTorch's LSTM is faster on them than on a `PackedSequence`.
        """
        starts = is_init.clone()
        starts[:, 0] = True
        first = starts.flatten().nonzero().squeeze(-1)
        lengths = torch.diff(first, append=first.new_tensor([starts.numel()]))
        rows = self.encoder(observation).flatten(0, 1).split(lengths.tolist())
        begin = state.masked_fill(is_init.unsqueeze(-1), 0.0).flatten(0, 1)[first]
        output, _ = self._run(nn.utils.rnn.pad_sequence(list(rows), batch_first=True), begin)
        features = nn.utils.rnn.unpad_sequence(output, lengths.cpu(), batch_first=True)
        return torch.cat(features).reshape(*is_init.shape, -1)

    def _run(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run the cell on `inputs` ``[n, T, F]`` from `state` ``[n, S]``; return its outputs and the new state."""
        if isinstance(self.cell, nn.GRU):
            output, new = self.cell(inputs, state.unsqueeze(0).contiguous())
            return output, new[0]
        output, new = self.cell(inputs, tuple(part.unsqueeze(0).contiguous() for part in state.chunk(2, -1)))
        return output, torch.cat([new[0][0], new[1][0]], -1)


class SideBySide(RecurrentNetwork):
    """Two recurrent networks on the same observations, each with its own state: a policy's and its critic's.

    Features and states are those of the policy's network, followed by those of the critic's.
    """

    def __init__(self, policy: RecurrentNetwork, critic: RecurrentNetwork) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic
        self.state_size = policy.state_size + critic.state_size

    @override
    def forward(self, observation: Observation, state: Tensor) -> tuple[Tensor, Tensor]:
        of_policy, of_critic = self._split(state)
        actor, critic = self.policy(observation, of_policy), self.critic(observation, of_critic)
        features, state = (torch.cat(both, -1) for both in zip(actor, critic, strict=True))
        return features, state

    @override
    def sequence(self, observation: Observation, state: Tensor, is_init: Tensor) -> Tensor:
        of_policy, of_critic = self._split(state)
        features = self.policy.sequence(observation, of_policy, is_init)
        return torch.cat([features, self.critic.sequence(observation, of_critic, is_init)], -1)

    def _split(self, state: Tensor) -> tuple[Tensor, ...]:
        return state.split([self.policy.state_size, self.critic.state_size], -1)


class FeatureSlice(nn.Module):
    """A part of the features: the columns from `start` to `stop`, which is the one after the last."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop = start, stop

    def forward(self, features: Tensor) -> Tensor:
        return features[..., self.start : self.stop]


class RecurrentPolicy(TensorDictModuleBase):
    """A policy with a state: reads "recurrent_state" ``[*B, S]``, and writes the new one under "next".

    Without a state it starts from zero; a collector passes it to the next step. The trunk of `network` is a
    `RecurrentNetwork`. `actions` makes distributions of the outputs of `network`, and is never called as a policy.
    """

    def __init__(self, network: Network, actions: Policy) -> None:
        super().__init__()
        self.in_keys = ["observation", STATE]
        self.out_keys: Any = ["action", "action_log_prob", ("next", STATE)]
        self.network, self.actions = network, actions

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on a batch of observations; returns the same `tensordict`."""
        observation, state = tensordict.get("observation"), tensordict.get(STATE, None)
        if state is None:
            state = next(self.parameters()).new_zeros(*tensordict.batch_size, self.network.trunk.state_size)
        features, state = self.network.trunk(self.network.normalizer(observation), state)
        parameters = self.actions.to_parameters(self.network.head(features), action_mask(observation))
        action = self.actions.choose(parameters, None if greedy() else self.actions.noise(parameters))
        tensordict.set("action", action)
        tensordict.set("action_log_prob", self.actions.log_prob(parameters, action))
        tensordict.set(("next", STATE), state)
        return tensordict

    def sequence(self, observation: Observation, state: Tensor, is_init: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distributions' parameters and the features of `R` sequences of `T` steps, ``[R, T, *]``."""
        features = self.network.trunk.sequence(self.network.normalizer(observation), state, is_init)
        return self.actions.to_parameters(self.network.head(features), action_mask(observation)), features


class RecurrentCritic(nn.Module):
    """A value function on the features of a `RecurrentPolicy`: the same ones, or the critic's columns of `SideBySide`.

    Its network has the trunk and the normaliser of the policy's network, and a head for the value.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Observation, state: Tensor) -> Tensor:
        """Return the values ``[*B]`` of observations ``[*B, *obs]`` in states ``[*B, S]``."""
        features, _ = self.network.trunk(self.network.normalizer(observation), state)
        return self.of_features(features)

    def of_features(self, features: Tensor) -> Tensor:
        return self.network.head(features).squeeze(-1)
