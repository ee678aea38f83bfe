"""A quick perceptron says what the usual modules say, whoever asks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

from learning.mlp import ACTIVATIONS, MLP

MODULES = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
SIZES = [4, 8, 8, 2]
LARGE = 20_000  # rows, of which torch makes the tanh


def twins(activation: str = "tanh", sizes: list[int] = SIZES, dtype: torch.dtype = torch.float32):
    """A perceptron, and the same in modules, on the same parameters; biases are not 0."""
    mlp = MLP(sizes, activation).to(dtype)
    parts: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        linear = nn.Linear(fan_in, fan_out, dtype=dtype)
        linear.weight, linear.bias = mlp.get_parameter(f"weight_{i}"), mlp.get_parameter(f"bias_{i}")
        nn.init.normal_(linear.bias)
        parts += [linear, MODULES[activation]()]
    return mlp, nn.Sequential(*parts[:-1])


def test_activations_are_those_of_the_modules() -> None:
    assert ACTIVATIONS.keys() == MODULES.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [(), (1,), (3, 5), (0,), (LARGE,)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_those_of_the_modules(
    activation: str, rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    mlp, modules = twins(activation, dtype=dtype)
    input = torch.randn(*rows, 4, dtype=dtype)
    before = input.clone()
    with torch.no_grad():
        torch.testing.assert_close(mlp(input), modules(input))
    assert torch.equal(input, before)
    for asked in (input, input.clone().requires_grad_()):
        wanted = [p for p in (*mlp.parameters(), asked) if p.requires_grad]
        losses = [network(asked).square().sum() / max(input.numel(), 1) for network in (mlp, modules)]
        ours, theirs = (torch.autograd.grad(loss, wanted) for loss in losses)
        torch.testing.assert_close(ours, theirs)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(0, 4))
def test_of_any_sizes(sizes: list[int], rows: int) -> None:
    mlp, modules = twins(sizes=sizes)
    input = torch.randn(rows, sizes[0])
    before = input.clone()
    with torch.no_grad():
        torch.testing.assert_close(mlp(input), modules(input))
    assert torch.equal(input, before)  # also where there is but one layer


def test_derivatives_of_first_and_second_order() -> None:
    mlp, _ = twins(dtype=torch.float64)
    input = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mlp, (input,)) and torch.autograd.gradgradcheck(mlp, (input,))


def by_vmap(network: nn.Module, input: Tensor) -> Tensor:
    return torch.vmap(network)(input)


def by_trace(network: nn.Module, input: Tensor) -> Tensor:
    return torch.jit.trace(network, torch.zeros_like(input))(input)


def by_export(network: nn.Module, input: Tensor) -> Tensor:
    return torch.export.export(network, (torch.zeros_like(input),)).module()(input)


def by_jacobian(network: nn.Module, input: Tensor) -> Tensor:
    return torch.func.jacrev(network)(input)


def by_tangent(network: nn.Module, input: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(network(forward_ad.make_dual(input, torch.ones_like(input)))).tangent


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("ask", [by_vmap, by_trace, by_export, by_jacobian, by_tangent])
def test_whoever_follows_the_operations_sees_them(ask, learning: bool) -> None:
    mlp, modules = twins()
    input = torch.randn(5, 4)
    with torch.set_grad_enabled(learning):
        torch.testing.assert_close(ask(mlp, input), ask(modules, input))
