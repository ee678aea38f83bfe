"""Tensors that lie partly in one memory: each would be given a value of its own, and the later one would win."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wsync.errors import LayoutMismatch


def require_apart(tensors: Mapping[str, Tensor], owner: str) -> None:
    """Check that no two tensors share a part of their memory.

    Tied tensors (one tensor under several names) are allowed, and so are two dense views of exactly the same bytes.

    Args:
        tensors: plain strided tensors, by name.
        owner: the owner of the tensors, for the message.

    Raises:
        LayoutMismatch: two of them overlap partly; names both.
    """
    spans: list[tuple[torch.device, int, int, str]] = []
    for name, tensor in tensors.items():
        if tensor.numel():
            begin = tensor.data_ptr()
            spans.append((tensor.device, begin, begin + _extent(tensor), name))
    spans.sort(key=lambda span: (str(span[0]), span[1], -span[2]))
    reaching: list[tuple[torch.device, int, int, str]] = []  # those that may reach into the next one
    for span in spans:
        device, begin, end, name = span
        reaching = [one for one in reaching if one[0] == device and one[2] > begin]
        for _, other_begin, other_end, other in reaching:
            same = (begin, end) == (other_begin, other_end) and _fills(tensors[name]) and _fills(tensors[other])
            if not same and _share_bytes(tensors[name], tensors[other]):
                raise LayoutMismatch(
                    f"'{other}' and '{name}' of {owner} overlap partly in one memory, so they cannot be carried: "
                    "clone one of them, or make them one tensor"
                )
        reaching.append(span)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of a tensor lie in one place."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _extent(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _fills(tensor: Tensor) -> bool:
    """Whether a tensor has every byte of its extent, each once."""
    return _extent(tensor) == tensor.numel() * tensor.element_size()


def _share_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have a byte in common; tensors with gaps, such as every second column, may lie interleaved.

    Two with the same place, shape, strides and element size are one tensor under two names: they do not count.
    """
    sizes = one.element_size(), other.element_size()
    alike = (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())
    if alike and sizes[0] == sizes[1]:
        return False
    base = min(one.data_ptr(), other.data_ptr())
    end = max(tensor.data_ptr() + _extent(tensor) for tensor in (one, other))
    used = torch.zeros(end - base, dtype=torch.bool, device="cpu")
    _bytes_of(one, used, base).fill_(True)
    return bool(_bytes_of(other, used, base).any())


def _bytes_of(tensor: Tensor, used: Tensor, base: int) -> Tensor:
    """The elements of ``used`` (one per byte from address ``base``) that stand for a tensor's bytes."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return used.as_strided([*tensor.shape, size], [*strides, 1], tensor.data_ptr() - base)
