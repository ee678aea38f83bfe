"""What ``Delta`` saves: consecutive bfloat16 versions of real trainings, sent through a store with it and without.

    python scripts/measure_delta.py [--versions 10] [--warm-up 10] [--level 1]

    PPO            CartPole-v1, the learner of this repository, two hidden layers of 512; a version is what a batch of
                   2,048 frames teaches (80 steps of Adam)
    transformer    4 layers of width 256, next byte of Python's standard library; a version after 1 and after 8 steps

Parameters and Adam are float32, as in mixed-precision training; a version is their cast to bfloat16. The break-even
bandwidth is that of a connection over which the full version takes as long as encoding, sending and decoding the
difference: on a slower one ``Delta`` saves time. *encode* and *decode* are what the difference adds to a send and to a
receive, in CPU seconds, so that other programs on the machine do not count. What is received is compared bit for bit.
"""

from __future__ import annotations

import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import wsync
from collectors import Collector, GymEnv
from learning import PPO, make_critic, make_policy
from wsync.transforms import Cast, Delta

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

    def forward(self, text: Tensor) -> Tensor:
        """Predict the next bytes."""
        hidden = self.bytes(text) + self.places.weight[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.layers(hidden, mask=mask, is_causal=True) @ self.bytes.weight.T


def transformer(lr: float, steps: int) -> Training:
    """Next-byte prediction on the source of Python's standard library; a version is ``steps`` steps of Adam."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    while True:
        for _ in range(steps):
            starts = torch.randint(len(text) - 129, (4,))
            windows = torch.stack([text[start : start + 129] for start in starts]).long()
            optimizer.zero_grad()
            F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        yield model


class Link:
    """A sender and a receiver of a store, both in this process.

    Args:
        folder: of the store.
        transform: of the sender.
        model: the trained one.
    """

    def __init__(self, folder: str, transform: Any, model: nn.Module) -> None:
        self.received = Cast("bfloat16")({name: one.detach() for name, one in model.state_dict().items()})
        self._sender = wsync.StoreWeightSyncScheme(folder, send_transform=transform)
        self._sender.init_on_sender("policy", model=model, num_workers=1)
        self._sender.connect()
        self._reader = wsync.StoreWeightSyncScheme(folder, initiator="receiver")
        self._reader.init_on_receiver("policy", model=self.received, worker_idx=0)
        self._reader.connect()

    def pass_on(self) -> tuple[int, float, float]:
        """Send and receive a version; return its bytes, and the CPU seconds of each end."""
        began = time.process_time()
        report = self._sender.send()
        sent = time.process_time()
        self._reader.pull(10.0)
        assert report is not None and self._reader.version == report.version
        return report.bytes, sent - began, time.process_time() - sent

    def close(self) -> None:
        """Close both ends."""
        self._reader.shutdown()
        self._sender.shutdown()


def measure(training: Training, level: int, warm_up: int, versions: int) -> list[str]:
    """Return the medians of a training, as text.

    Raises:
        AssertionError: a difference is not exact.
    """
    found = list[tuple[float, ...]]()
    model, cast = next(training), Cast("bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        full, delta = Link(f"{folder}/full", cast, model), Link(f"{folder}/delta", [cast, Delta(level)], model)
        for number in range(warm_up + versions):
            before = {name: one.clone() for name, one in delta.received.items()}
            next(training)
            (nbytes, send, read), (size, encode, decode) = full.pass_on(), delta.pass_on()
            assert all(torch.equal(full.received[name], one) for name, one in delta.received.items()), "not exact"
            changed = sum(int((delta.received[name] != one).sum()) for name, one in before.items())
            share = changed / sum(one.numel() for one in before.values())
            if number >= warm_up:
                found.append((nbytes, share, size, encode - send, decode - read))
        full.close()
        delta.close()
    nbytes, share, size, encode, decode = (statistics.median(column) for column in zip(*found, strict=True))
    saved, seconds = nbytes - size, encode + decode
    bandwidth = "never" if saved <= 0 else f"{8 * saved / seconds / 1e9:.2f} Gbit/s" if seconds > 0 else "any"
    times = [f"{1e3 * encode:.2f} ms", f"{1e3 * decode:.2f} ms"]
    return [f"{nbytes / 1e6:.2f} MB", f"{share:.1%}", f"{size / nbytes:.1%}", *times, bandwidth]


def main(versions: int = 10, warm_up: int = 10, level: int = 1) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(1)
    table = Table("training", "lr", "steps", "version", "changed", "difference", "encode", "decode", "break-even")
    for training, steps in ((ppo, 80), (transformer, 1), (transformer, 8)):
        for lr in (1e-6, 1e-4):
            torch.manual_seed(0)
            cells = measure(training(lr, steps), level, warm_up, versions)
            table.add_row(training.__name__, f"{lr:.0e}", str(steps), *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
