"""Models of the contract suite: made by name in any process, filled with known values, compared bit for bit."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class Small(nn.Module):
    """One parameter of ``size`` values; the output is the first four.

    Or, ``twice``: the smallest and the largest value that were found in two reads, with work between.
    """

    def __init__(self, size: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, *, twice: bool = False) -> Tensor:
        if not twice:
            return self.weight[:4]
        first = self.weight.detach().clone()
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        both = torch.cat([first, self.weight.detach()])
        return torch.stack([both.min(), both.max()])


def make_large() -> Small:
    """32 MiB in one parameter: more than a socket buffers."""
    return Small(2**23)


class WithExtraState(Small):
    """One parameter and extra state (``state``), which some workers refuse.

    The extra state ``"refuse"`` is refused by every worker, ``"refuse 1"`` by worker 1 alone: ``set_extra_state``
    raises when it has already changed the module.
    """

    worker_idx = -1
    """Of this process; ``commands.init`` sets it."""

    def __init__(self) -> None:
        super().__init__(3)
        self.state: Any = {"steps": 0}

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        if state in ("refuse", f"refuse {self.worker_idx}"):
            self.state = "half applied"
            raise ArithmeticError(f"the extra state {state!r} is refused")
        self.state = state


class EveryTensorKind(nn.Module):
    """Each kind of parameter and buffer that a model can have, ties and extra state included."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.norm = nn.BatchNorm2d(8)
        self.embed = nn.Embedding(11, 6)
        self.decode = nn.Linear(6, 11, bias=False)
        self.decode.weight = self.embed.weight
        self.bfloat = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.zeros(2, 7, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.zeros(4, 6).t())
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.zeros(1, 2)[:, ::2])  # of one element, with a stride of 2
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(9, dtype=torch.bool))
        self.register_buffer("nothing", None)
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.deep = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1)))
        self.tail = WithExtraState()

    def forward(self) -> Tensor:
        return self.scalar


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Every parameter and buffer of a module by name; a tied tensor under each of its names."""
    if not isinstance(model, nn.Module):
        return dict(model)
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@torch.no_grad()
def fill(model: M, value: float) -> M:
    """Set every value of every parameter; returns the model."""
    for parameter in model.parameters():
        parameter.fill_(value)
    return model


@torch.no_grad()
def scramble(model: M, seed: int) -> M:
    """Fill every tensor with random bits, NaNs among them, and set the extra state; return the model."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in named_tensors(model).values():
        size = tensor.numel() * tensor.element_size()
        bits = torch.randint(0, 2 if tensor.dtype is torch.bool else 256, (size,), generator=generator)
        tensor.copy_(bits.to(torch.uint8).view(tensor.dtype).reshape(tensor.shape))
    for module in model.modules():
        if isinstance(module, WithExtraState):
            module.state = {"steps": seed, "text": f"é{seed}", "tensor": torch.full((2,), seed)}
    return model


@torch.no_grad()
def nudge(model: nn.Module, count: int | None = None) -> None:
    """Change ``count`` values of every parameter, or all of them."""
    for parameter in model.parameters():
        parameter.view(-1)[:count].normal_()


def digest(model: Any) -> dict[str, Any]:
    """The model's weights as plain values: form and ties of each tensor, a hash of its bytes, and the extra state."""
    result, first = dict[str, Any](), dict[int, str]()
    for name, tensor in named_tensors(model).items():
        dense = tensor.detach().clone(memory_format=torch.contiguous_format)
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        form = str(tensor.dtype), tuple(tensor.shape), tensor.stride() if tensor.numel() else ()
        result[name] = *form, first.setdefault(id(tensor), name), hashlib.sha256(data).hexdigest()[:16]
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, WithExtraState):
            result[f"{name}._extra_state".lstrip(".")] = repr(module.state)
    return result
