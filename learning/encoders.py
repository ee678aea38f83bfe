"""Networks that turn the observations of any space into features: ``mlp`` and ``cnn``.

A network of a policy is a module that maps observations ``[*B, *obs]`` (a tensor, or a TensorDict for a Dict or Tuple
space) to features ``[*B, F]``. It is made with the spec of an observation as its first argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from collectors.environments import specs
from collectors.environments.specs import ACTION_MASK, Spec, SpecTree, as_tensors
from collectors.environments.transforms import without_side_effects

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
SMALLEST = 36  # height and width that `NatureCNN` needs
Observation = Any  # a tensor ``[*B, *obs]``, or a TensorDict of such tensors


def linear(fan_in: int, fan_out: int, gain: float = math.sqrt(2.0)) -> nn.Linear:
    """Return a linear layer with orthogonal weights (https://arxiv.org/abs/1312.6120) and biases of zero."""
    layer = nn.Linear(fan_in, fan_out, dtype=torch.float32)  # as observations, not torch's default
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def leaves(spec: SpecTree, *path: str) -> Iterator[tuple[tuple[str, ...], Spec]]:
    """Yield the path and the spec of each tensor that is an input of a network: all but the action mask."""
    if isinstance(spec, Spec):
        yield path, spec
        return
    for name, part in spec.items():
        if (*path, name) != (ACTION_MASK,):
            yield from leaves(part, *path, name)


def feature_size(network: nn.Module, spec: SpecTree) -> int:
    """Return the number of features that `network` gives for observations of `spec`; calls it once with zeros.

    The zeros have two leading dimensions, as the batches of a learner have: ValueError if the network drops them.
    A recurrent network has a ``state_size``.
    """
    state_size = getattr(network, "state_size", None)
    observation = as_tensors(specs.zeros(spec, 2, 3), 2, 3)
    with torch.no_grad(), without_side_effects(network):
        state = () if state_size is None else (torch.zeros(2, 3, state_size, dtype=torch.float32),)
        features = network(observation, *state)
        features = features[0] if state else features
    if not isinstance(features, Tensor) or features.ndim != 3 or features.shape[:2] != (2, 3):
        got = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        needed = "one vector of features for each observation, [2, 3, F]"
        raise ValueError(f"the network has to give {needed}; it gave {got}")
    return features.shape[2]


class Flatten(nn.Module):
    """All tensors of an observation, given by `leaves`, as one vector of floats; uint8 divided by its upper bound."""

    def __init__(self, paths: Sequence[tuple[tuple[str, ...], Spec]]) -> None:
        super().__init__()
        self.paths = [(path, len(spec.shape), _divisor(spec)) for path, spec in paths]
        self.size = sum(spec.shape.numel() for _, spec in paths)

    def forward(self, observation: Observation) -> Tensor:
        parts = [_unit(_at(observation, path), divisor).flatten(-dims) for path, dims, divisor in self.paths]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class MLP(nn.Module):
    """Linear layers, each followed by the activation, on all tensors of an observation as one vector.

    Args:
        observation_spec: the spec of an observation.
        hidden: widths of the layers.
        activation: one of ``tanh``, ``relu``, ``elu``, ``silu``.

    Raises:
        ValueError: an unknown `activation`.
    """

    def __init__(self, observation_spec: SpecTree, hidden: Sequence[int] = (64, 64), activation: str = "tanh") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}: one of {', '.join(ACTIVATIONS)}")
        flatten, one = Flatten([*leaves(observation_spec)]), observation_spec
        is_vector = isinstance(one, Spec) and len(one.shape) == 1 and one.dtype.is_floating_point
        layers: list[nn.Module] = [] if is_vector else [flatten]
        for sizes in pairwise([flatten.size, *hidden]):
            layers += [linear(*sizes), ACTIVATIONS[activation]()]
        self.layers = nn.Sequential(*layers)

    def forward(self, observation: Observation) -> Tensor:
        """Return features ``[*B, hidden[-1]]``."""
        return self.layers(observation)


class NatureCNN(nn.Module):
    """Three convolutions and a linear layer for images, as in https://www.nature.com/articles/nature14236.

    Pixels are divided by the upper bound of `spec`, which is that of an image for which `suits_convolutions` is true.
    """

    def __init__(self, spec: Spec, features: int = 512) -> None:
        super().__init__()
        self.channels_last, channels, height, width = _image_layout(spec)
        self.divisor = _divisor(spec)
        layers: list[nn.Module] = []
        for fan_in, fan_out, kernel, stride in ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
            convolution = nn.Conv2d(fan_in, fan_out, kernel, stride, dtype=torch.float32)
            nn.init.orthogonal_(convolution.weight, math.sqrt(2.0))
            nn.init.constant_(convolution.get_parameter("bias"), 0.0)
            layers += [convolution, nn.ReLU()]
            height, width = ((side - kernel) // stride + 1 for side in (height, width))
        self.layers = nn.Sequential(*layers, nn.Flatten(), linear(64 * height * width, features), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        """Return features ``[*B, features]`` of images ``[*B, *spec.shape]``."""
        flat = _unit(image.flatten(0, -4) if image.ndim > 3 else image.unsqueeze(0), self.divisor)
        features = self.layers(flat.movedim(-1, 1) if self.channels_last else flat)
        return features.reshape(*image.shape[:-3], features.shape[-1])


class CNN(nn.Module):
    """A `NatureCNN` for each image of an observation that is large enough; all other tensors follow as vectors.

    Args:
        observation_spec: the spec of an observation.
        features: number of features of each image.

    Raises:
        ValueError: there is no image (uint8, three dimensions), or none is large enough; see `suits_convolutions`.
    """

    def __init__(self, observation_spec: SpecTree, features: int = 512) -> None:
        super().__init__()
        paths = [*leaves(observation_spec)]
        images = [(path, spec) for path, spec in paths if suits_convolutions(spec)]
        others = [(path, spec) for path, spec in paths if not suits_convolutions(spec)]
        if not images:
            needed = f"an image (uint8, three dimensions) of at least {SMALLEST} × {SMALLEST}"
            raise ValueError(f"convolutions need {needed}: policy=mlp takes observations as vectors")
        self.paths = [path for path, _ in images]
        self.images = nn.ModuleList(NatureCNN(spec, features) for _, spec in images)
        self.others = Flatten(others) if others else None

    def forward(self, observation: Observation) -> Tensor:
        parts = [network(_at(observation, path)) for path, network in zip(self.paths, self.images, strict=True)]
        if self.others is not None:
            parts.append(self.others(observation))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def suits_convolutions(spec: Spec) -> bool:
    """Whether `spec` is that of an image (uint8 ``[C, H, W]`` or ``[H, W, C]``) with at least 36 rows and columns."""
    is_image = spec.dtype == torch.uint8 and len(spec.shape) == 3
    return is_image and min(_image_layout(spec)[2:]) >= SMALLEST


def _image_layout(spec: Spec) -> tuple[bool, int, int, int]:
    """Return whether channels are last (if the last size is less than the first), and channels, height and width."""
    first, second, third = spec.shape
    return (True, third, first, second) if third < first else (False, first, second, third)


def _at(observation: Observation, path: tuple[str, ...]) -> Tensor:
    return observation.get(path) if isinstance(observation, TensorDictBase) else observation


def _divisor(spec: Spec) -> float:
    """Return the upper bound of a uint8 observation, at least 1; 255 if `spec` has none."""
    return 255.0 if spec.high is None or not spec.high.numel() else max(1.0, spec.high.max().item())


def _unit(tensor: Tensor, divisor: float) -> Tensor:
    return tensor / divisor if tensor.dtype == torch.uint8 else tensor  # floats
