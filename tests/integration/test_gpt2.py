"""A GPT-2 of ``transformers`` in the trainer: every carrier, an engine of another class, LoRA, a part of the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program
from torch import Tensor, nn
from torch.nn.utils import parametrize

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.transforms import Cast, Select

pytest.importorskip("transformers", reason="the GPT-2 is one of transformers, which is not installed")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("carrier", "precision"),
    [("shared_mem", "int8"), ("store", "int8"), ("http", "bfloat16"), ("ray", "bfloat16")],
)
def test_an_engine_of_another_class(carrier: str, precision: str, tmp_path: Path) -> None:
    """The example compares the logits of each version, which a generating process has made, with a reference's."""
    if carrier == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    program = ROOT / "examples" / "unlike_ends.py"
    done = run_program(program, f"{carrier}-{precision}", folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"GPT2LMHeadModel → Engine by {carrier}, {precision}:\n")
    line = r"^version \d+: (\d+) bytes of 2675200; logits 0\.0 off the reference"
    sizes = [int(found) for found in re.findall(line, done.stdout, re.MULTILINE)]
    assert sizes == [700672 if precision == "int8" else 1337600] * 5, done.stdout


class LowRank(nn.Module):
    """Adds ``A @ B`` to a weight (LoRA).

    Args:
        weight: that it is added to, of shape ``[in, out]``.
        rank: of the product.
    """

    def __init__(self, weight: Tensor, rank: int = 4) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(0.02 * torch.randn(weight.shape[0], rank))
        self.lora_b = nn.Parameter(torch.zeros(rank, weight.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.lora_a @ self.lora_b


def gpt2() -> Any:
    """Return a small GPT-2, the same at each call, with LoRA in its attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 128, "n_head": 4, "n_layer": 3, "vocab_size": 512, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    for block in model.transformer.h:
        parametrize.register_parametrization(block.attn.c_attn, "weight", LowRank(block.attn.c_attn.weight))
    return model


def bfloat16_gpt2() -> Any:
    return gpt2().bfloat16()


def logits_of(state: WorkerState) -> Tensor:
    with torch.no_grad():
        return state.models["policy"](torch.arange(32)[None]).logits.float()


def reference(trained: Any) -> Tensor:
    with torch.no_grad():
        copy = bfloat16_gpt2()
        copy.load_state_dict(trained.state_dict())
        return copy(torch.arange(32)[None]).logits.float()


def lora_bytes(model: nn.Module) -> int:
    return sum(2 * one.numel() for name, one in model.named_parameters() if "lora" in name)


def train(model: Any) -> None:
    """Take a step with the adapter's parameters alone."""
    adapter = [one for name, one in model.named_parameters() if "lora" in name]
    tokens = torch.randint(512, (2, 32))
    loss = model(tokens, labels=tokens).loss
    for parameter, gradient in zip(adapter, torch.autograd.grad(loss, adapter), strict=True):
        parameter.data -= 0.5 * gradient.sign() * 0.02


@pytest.mark.parametrize("backend", ["shared_mem", "distributed"])
def test_lora_alone_is_the_bytes_of_the_adapter(pool: WorkerPool, backend: str) -> None:
    model = gpt2()
    options = {"shared_memory": False} if backend == "distributed" else {}
    select = [Select("lora_*"), Cast("bfloat16")]
    with pool.group(1) as workers:
        scheme = wsync.WeightSyncScheme.from_backend(backend, send_transform=select, timeout=60.0, **options)
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers[0].start(commands.join, scheme, bfloat16_gpt2, 0, "policy")
        scheme.connect()
        workers[0].result()
        for _ in range(3):
            train(model)
            report = scheme.send()
            assert report is not None and report.bytes == lora_bytes(model)
            assert torch.equal(workers[0].call(logits_of), reference(model))
        scheme.shutdown()


def test_an_adapter_as_a_part_of_the_whole_model(pool: WorkerPool) -> None:
    """One version number for the mixture: what was not sent keeps the values that were sent last."""
    model = gpt2()
    with pool.group(1) as workers:
        scheme = wsync.SharedMemWeightSyncScheme(send_transform=Cast("bfloat16"), timeout=60.0)
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers[0].start(commands.join, scheme, bfloat16_gpt2, 0, "policy")
        scheme.connect()
        workers[0].result()
        train(model)
        expected = reference(model)
        adapter = {name: one.detach().clone() for name, one in model.named_parameters() if "lora" in name}
        model.transformer.wte.weight.data.zero_()  # is not sent
        report = scheme.send(adapter, partial=True)
        assert report is not None and report.version == 2
        assert torch.equal(workers[0].call(logits_of), expected)
        scheme.shutdown()
