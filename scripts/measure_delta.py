"""What ``Delta`` saves: consecutive bfloat16 versions of three real trainings, encoded and decoded.

    python scripts/measure_delta.py [--versions 10] [--warm-up 10] [--level 1]

    PPO            CartPole-v1, the learner of this repository, two hidden layers of 512; a version is what a batch of
                   2,048 frames teaches (80 steps of Adam)
    transformer    4 layers of width 256, next byte of Python's standard library; a version after 1 and after 8 steps
    CNN            4 convolutions, position and angle from rendered frames of CartPole; the same

Parameters and Adam are float32, as in mixed-precision training; a version is their cast to bfloat16. The break-even
bandwidth is that of a connection over which the full version takes as long as encoding, sending and decoding the
difference: on a slower one ``Delta`` saves time. Times are CPU seconds of one thread, so that other programs on the
machine do not count. Every result is compared bit for bit with the full version.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from collectors import Collector, GymEnv
from learning import make_critic, make_policy
from learning.ppo import PPO
from wsync.transforms import Cast, Delta
from wsync.transforms.delta import apply_difference
from wsync.weights.layout import Layout
from wsync.weights.packing import packed

Training = Iterator[nn.Module]
"""A training: yields the model, trained on, whenever a version is complete."""


def ppo(lr: float, _: int) -> Training:
    """PPO on CartPole."""
    env = GymEnv("CartPole-v1")
    observations = env.observation_spec["observation"].shape[-1]
    policy = make_policy(observations, env.action_spec, hidden=(512, 512))
    learner = PPO(policy, make_critic(observations), lr=lr)
    with Collector(
        lambda: GymEnv("CartPole-v1", num_envs=8), policy, frames_per_batch=2048, total_frames=10**9
    ) as batches:
        for batch in batches:
            learner.update(batch)
            yield policy


class Transformer(nn.Module):
    """A decoder of bytes ``[batch, length]``; returns logits ``[batch, length, 256]``."""

    def __init__(self, width: int = 256, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """See the class."""
        hidden = self.bytes(text) + self.places.weight[: text.shape[1]]
        return self.layers(hidden, mask=self.mask, is_causal=True) @ self.bytes.weight.T


def transformer(lr: float, steps: int) -> Training:
    """Next-byte prediction on the source of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)

    def loss(model: nn.Module) -> Tensor:
        starts = torch.randint(len(text) - 129, (4,))
        windows = torch.stack([text[start : start + 129] for start in starts]).long()
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    return trained(Transformer(), loss, lr, steps)


def cnn(lr: float, steps: int) -> Training:
    """Position and angle of CartPole from its frames."""
    images, states = rendered(512)
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 16, 2))

    def loss(model: nn.Module) -> Tensor:
        chosen = torch.randint(len(images), (32,))
        return F.mse_loss(model(images[chosen]), states[chosen])

    return trained(model, loss, lr, steps)


def rendered(count: int) -> tuple[Tensor, Tensor]:
    """Return frames ``[count, 1, 64, 64]`` of random play, and cart position and pole angle ``[count, 2]``."""
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    frames, states = list[Tensor](), list[Tensor]()
    state, _ = env.reset(seed=0)
    while len(frames) < count:
        image = torch.from_numpy(np.array(env.render())).float().mean(-1)[None, None] / 255
        frames.append(F.interpolate(image, (64, 64), mode="area")[0])
        states.append(torch.tensor([state[0], state[2]], dtype=torch.float32))
        state, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            state, _ = env.reset()
    env.close()
    return torch.stack(frames), torch.stack(states)


def trained(model: nn.Module, loss: Callable[[nn.Module], Tensor], lr: float, steps: int) -> Training:
    """Train with Adam, gradients clipped to norm 1; a version is ``steps`` steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    while True:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        yield model


class Measured(NamedTuple):
    """One pair of consecutive versions.

    Attributes:
        changed: share of the values that differ.
        size: the size of the difference, in bytes; the full size, where there is none.
        encode: CPU seconds.
        decode: CPU seconds.
    """

    changed: float
    size: int
    encode: float
    decode: float


def compare(delta: Delta, layout: Layout, base: Tensor, new: Tensor) -> Measured:
    """Encode and decode one version.

    Raises:
        AssertionError: the result is not exact.
    """
    changed = float((base.view(torch.int16) != new.view(torch.int16)).float().mean())
    began = time.process_time()
    difference = delta.difference(base, 1, new, layout.width)
    encoded = time.process_time()
    if difference is None:
        return Measured(changed, layout.nbytes, encoded - began, 0.0)
    result = torch.empty_like(base)
    encoded, started = encoded - began, time.process_time()
    apply_difference(difference, base, result)
    decoded = time.process_time() - started
    assert torch.equal(result, new), "the difference is not exact"
    return Measured(changed, len(difference), encoded, decoded)


def measure(training: Training, delta: Delta, warm_up: int, versions: int) -> tuple[int, list[Measured]]:
    """Return the bytes of a full version, and what each difference took."""
    found, base = list[Measured](), None
    for number, model in enumerate(training):
        layout, buffer = packed(Cast("bfloat16")(model.state_dict()))
        new = buffer.flat
        if base is not None and number > warm_up:
            found.append(compare(delta, layout, base, new))
        if len(found) == versions:
            return layout.nbytes, found
        base = new
    raise AssertionError("a training has no end")


def row(nbytes: int, found: list[Measured]) -> list[str]:
    """Return medians as text."""
    changed, size, encode, decode = (statistics.median(column) for column in zip(*found, strict=True))
    saved, seconds = nbytes - size, encode + decode
    bandwidth = f"{8 * saved / seconds / 1e9:.2f} Gbit/s" if saved > 0 else "never"
    times = [f"{1e3 * encode:.2f} ms", f"{1e3 * decode:.2f} ms"]
    return [f"{nbytes / 1e6:.2f} MB", f"{changed:.1%}", f"{size / nbytes:.1%}", *times, bandwidth]


def main(versions: int = 10, warm_up: int = 10, level: int = 1) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(1)
    table = Table("training", "lr", "steps", "version", "changed", "difference", "encode", "decode", "break-even")
    cases = [(ppo, 80), (transformer, 1), (transformer, 8), (cnn, 1), (cnn, 8)]
    for training, steps in cases:
        for lr in (1e-6, 1e-4):
            torch.manual_seed(0)
            result = measure(training(lr, steps), Delta(level), warm_up, versions)
            table.add_row(training.__name__, f"{lr:.0e}", str(steps), *row(*result))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
