"""Weights of any dtype, shape, strides and ties arrive bit for bit, by the names within a module's wrappers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed, nn
from workers_here import connect, make_worker

import wsync

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int16, torch.uint8, torch.bool]


class Tensors(nn.Module):
    """Buffers of these names."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Any bits, dense or not, expanded, or empty."""
    shape, dtype = draw(st.lists(st.integers(0, 4), max_size=4)), draw(st.sampled_from(DTYPES))
    nbytes = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if nbytes else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape).permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[..., ::2]
    return tensor.unsqueeze(0).expand(3, *tensor.shape) if draw(st.booleans()) else tensor


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    dense = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tensor.shape, dense.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", [wsync.SharedMemWeightSyncScheme, wsync.MultiProcessWeightSyncScheme])
def test_any_tensors_arrive(kind: Any) -> None:
    @settings(deadline=None, max_examples=40)
    @given(st.lists(tensors(), min_size=1, max_size=5), st.booleans())
    def arrive(values: list[Tensor], tied: bool) -> None:
        named = {f"t{index}": value for index, value in enumerate(values)}
        if tied:
            named["tied"] = values[0]
        source, model = Tensors(named), Tensors({name: torch.zeros_like(value) for name, value in named.items()})
        if tied:
            model.tied = model.t0
        with kind(timeout=20.0) as sender:
            sender.init_on_sender("policy", model=source, num_workers=1)
            with make_worker(sender, 0, model=model) as worker:
                connect(sender.connect, worker)
                assert all(bits(model.get_buffer(name)) == bits(value) for name, value in named.items())

    arrive()


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: torch.compile(nn.DataParallel(model))])
def test_names_have_no_prefix_of_a_wrapper(wrap: Any) -> None:
    model, copy = nn.Linear(2, 2), nn.Linear(2, 2)
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", copy, wrap(model))
        nn.init.zeros_(model.weight)
        scheme.send()
        assert copy.weight.eq(0).all()
        scheme.send(wrap(nn.Linear(2, 2)))
        assert not copy.weight.eq(0).any()


def test_data_parallel_training_sends_by_the_names_of_the_module() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, copy = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
        with wsync.SharedMemWeightSyncScheme() as scheme:
            scheme.init_in_process("policy", copy, model)
            assert torch.equal(copy.weight, model.module.weight)
    finally:
        distributed.destroy_process_group()
