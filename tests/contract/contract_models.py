"""Models for the contract: made by name in any process, filled with chosen bits, and compared bit for bit."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch
from torch import Tensor, nn


class Tail(nn.Module):
    """Has extra state, and refuses it when it says so: ``"refuse"`` everywhere, ``"refuse <n>"`` on worker n."""

    worker = -1

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.note: Any = {"steps": 0}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        if state in ("refuse", f"refuse {self.worker}"):
            self.note = "half applied"
            raise ArithmeticError(f"Tail does not want {state!r}")
        self.note = state

    def forward(self) -> Tensor:
        return self.weight


class Hard(nn.Module):
    """Everything that is hard to carry."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.embed = nn.Embedding(11, 6)
        self.decode = nn.Linear(6, 11, bias=False)
        self.decode.weight = self.embed.weight
        self.brief = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.zeros(2, 7, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.zeros(4, 6).t())
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(9, dtype=torch.bool))
        self.register_buffer("nothing", None)
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.deep = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1)))
        self.tail = Tail()

    def forward(self) -> Tensor:
        return self.scalar


class Small(nn.Module):
    """Its output is its only weight."""

    def __init__(self, size: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self) -> Tensor:
        return self.weight


class Noted(Small):
    """A weight and a buffer, all of one value."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("note", torch.zeros(4))
        self.note: Tensor
        self.fill(value)

    @torch.no_grad()
    def fill(self, value: float) -> None:
        for tensor in self.state_dict().values():
            tensor.fill_(value)


class Apart(Small):
    """Two weights, of which its output is one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(4))


class Joined(Apart):
    """The same, but here they are one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.weight


class Large(Small):
    """32 MiB, more than a socket takes at once; its output is its first value."""

    def __init__(self) -> None:
        super().__init__(2**23)

    def forward(self) -> Tensor:
        return self.weight[:1]


class Stuck(Small):
    """Its forward, once it has a ``fifo``, says there that it has begun, and does not end."""

    fifo = ""

    def forward(self) -> Tensor:
        if self.fifo:
            with open(self.fifo, "w"):
                pass
            threading.Event().wait()
        return super().forward()


class Frozen(Small):
    """Lets nobody set anything, so that it cannot be gated either."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "frozen" and "frozen" in vars(self):
            raise ArithmeticError(f"{name} is frozen")
        super().__setattr__(name, value)


class Other(nn.Module):
    """Not a ``Small``: another name."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self) -> Tensor:
        return self.bias


def longer() -> Small:
    return Small(7)


def double() -> Small:
    return Small(4, torch.float64)


def big() -> Small:
    return Small(2**20)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, each name of a tied one included."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@torch.no_grad()
def scramble(model: nn.Module, seed: int) -> nn.Module:
    """Fill every tensor with random bits (NaNs, infinities and denormals among them) and the extra state."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in named_tensors(model).values():
        size = tensor.numel() * tensor.element_size()
        bits = torch.randint(0, 2 if tensor.dtype is torch.bool else 256, (size,), generator=generator)
        tensor.copy_(bits.to(torch.uint8).view(tensor.dtype).reshape(tensor.shape))
    for module in model.modules():
        if isinstance(module, Tail):
            module.note = {"steps": seed, "text": f"é{seed}", "tensor": torch.full((2,), seed)}
    return model


@torch.no_grad()
def fill(model: nn.Module, value: float) -> nn.Module:
    for parameter in model.parameters():
        parameter.fill_(value)
    return model


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(data).hexdigest()[:16]


def digest(model: nn.Module) -> dict[str, Any]:
    """What a model's weights are, as plain values that cross a pipe."""
    result: dict[str, Any] = {name: bits(tensor) for name, tensor in named_tensors(model).items()}
    for name, module in model.named_modules():
        if isinstance(module, Tail):
            result[f"{name}._extra_state"] = repr(module.note)
    return result


def strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tensor.stride() for name, tensor in named_tensors(model).items() if tensor.numel()}


def ties(model: nn.Module) -> bool:
    return model.embed.weight is model.decode.weight and model.embed.weight.data_ptr() == model.decode.weight.data_ptr()


class Plain(nn.Module):
    """Nothing but tensors, of every kind that is copied as bytes, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.embed = nn.Embedding(5, 6)
        self.decode = nn.Linear(6, 5, bias=False)
        self.decode.weight = self.embed.weight
        self.brief = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.zeros(9, dtype=torch.bool))

    def forward(self) -> Tensor:
        return self.scalar
