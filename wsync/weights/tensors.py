"""Single tensors: what can be carried, copies, bytes, ties, overlaps."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch
import xxhash
from torch import Tensor, nn

from wsync.errors import LayoutMismatch

P = ParamSpec("P")
R = TypeVar("R")
_SHOWN = 8


def describe(problems: Sequence[str]) -> str:
    """Return problems in one readable sentence, the first few of them whole."""
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "; ".join([*problems[:_SHOWN], *more])


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor. Its class is not imported for this: that would take half a second."""
    return type(tensor) is not Tensor and type(tensor) is not nn.Parameter and hasattr(type(tensor), "full_tensor")


def defect_of(tensor: Tensor, *, writable: bool = False) -> str:
    """Return why a tensor cannot be sent, or (``writable``) be written value by value; empty if it can be."""
    if is_sharded(tensor):
        return "is a shard (DTensor); only whole tensors are carried: see docs/tutorials/sharded_trainer.md"
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else "sparse"
        return f"is {kind} ({tensor.layout}, {tensor.dtype}); only dense, plain tensors are carried"
    if tensor.is_meta:
        return "has no values: it is on the meta device, and to_empty() would give it memory"
    if writable and (tensor.is_conj() or tensor.is_neg()):
        return "is lazily conjugated or negated: clone it"
    return "has elements that share memory: clone it" if writable and overlaps_itself(tensor) else ""


def require_whole(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``LayoutMismatch`` if this rank has only shards of some of these weights (FSDP2)."""
    sharded = [name for name, tensor in tensors.items() if is_sharded(tensor)]
    require_carried(sharded, [tensors[name] for name in sharded])


def require_carried(names: Sequence[str], tensors: Sequence[Tensor], receiver: str = "") -> None:
    """Raise ``LayoutMismatch`` if some of these weights cannot be sent, or some of ``receiver`` cannot be written."""
    defects = [(name, defect_of(one, writable=bool(receiver))) for name, one in zip(names, tensors, strict=True)]
    odd = [f"'{name}' {defect}" for name, defect in defects if defect]
    if odd:
        raise LayoutMismatch(f"{receiver or 'these weights'}: {describe(odd)}")


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether several elements may lie in one place, as in an expanded tensor."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def copy_all(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its destination by PyTorch; on return the copies have ended, on a GPU as well."""
    gpus = _gpus(destinations) | _gpus(sources)
    with torch.no_grad():
        torch._foreach_copy_(list(destinations), list(sources), bool(gpus))  # pyright: ignore[reportPrivateImportUsage]
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()


def copy_into_model(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy as ``copy_all`` into tensors of a model that no forward uses; some may be inference tensors.

    On a GPU, the kernels of a forward may run after the forward has returned, on any stream: they are waited for.
    """
    for gpu in _gpus(destinations):
        torch.cuda.synchronize(gpu)
    with torch.inference_mode():
        copy_all(destinations, sources)


def _gpus(tensors: Sequence[Tensor]) -> set[torch.device]:
    if not torch.cuda.is_initialized():
        return set()
    return {tensor.device for tensor in tensors if tensor.is_cuda}


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, ``uint8[nbytes]``: its own memory if it is contiguous, else a copy."""
    dense = tensor.detach().contiguous()
    # Not reshape(-1): one element is contiguous with any stride, and view(dtype) needs a stride of 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are alike, NaNs included."""
    return torch.equal(one, other) or torch.equal(raw_bytes(one), raw_bytes(other))


def digest_of(tensor: Tensor) -> int:
    """Return a digest of a tensor's dtype, shape and bytes."""
    digest = xxhash.xxh3_64(f"{tensor.dtype} {[*tensor.shape]}".encode())
    digest.update(raw_bytes(tensor).numpy(force=True).data)
    return digest.intdigest()


def tie_leaders(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the index of the first one that it is tied to: that has the same memory and form.

    An empty tensor is tied to none: all of them have address 0.
    """
    if len({one.data_ptr() for one in tensors}) == len(tensors):
        return [*range(len(tensors))]
    first, leaders = dict[tuple[object, ...], int](), list[int]()
    for index, one in enumerate(tensors):
        # A lazily conjugated or negated view has the memory of its base.
        key = one.device, one.data_ptr(), one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg()
        leaders.append(first.setdefault(key, index) if one.numel() else index)
    return leaders


def require_apart(tensors: Mapping[str, Tensor], owner: str) -> None:
    """Raise ``LayoutMismatch`` if two tensors of ``owner`` reach into each other's memory: the later one would win.

    Tied tensors are allowed: one tensor under several names.
    """
    spans = list[tuple[str, int, int, str]]()
    for name, one in tensors.items():
        last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
        if one.numel():
            begin = one.data_ptr()
            spans.append((str(one.device), begin, begin + (last + 1) * one.element_size(), name))
    spans.sort()
    for (device, _, end, name), (other_device, other_begin, _, other) in pairwise(spans):
        if device == other_device and other_begin < end and any(tie_leaders([tensors[name], tensors[other]])):
            raise LayoutMismatch(
                f"'{name}' and '{other}' of {owner} overlap in one memory, so they cannot be carried: clone one of "
                "them, or make them one tensor"
            )


def in_clean_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``function`` in a thread of its own: tensors for other threads are not made under this thread's modes.

    Such modes are ``no_grad``, ``inference_mode``, ``torch.func.grad`` and fake tensors.
    """
    with ThreadPoolExecutor(1, "wsync-clean") as thread:
        return thread.submit(function, *args, **kwargs).result()


class PinnedMapping(mmap.mmap):
    """A mapping of memory, which a GPU copies several times as fast if ``pin`` was called in a process that uses it."""

    _pinned_by, _address, _gpu = -1, 0, -1  # id of the process, where, and for which GPU

    def pin(self) -> None:
        """Pin the memory, if this process uses a GPU. Called once. Memory that CUDA does not pin remains usable."""
        if torch.cuda.is_initialized():
            has_context: Any = torch._C._cuda_hasPrimaryContext  # pyright: ignore[reportAttributeAccessIssue]
            self._gpu = next(filter(has_context, range(torch.cuda.device_count())), -1)  # a new one would take memory
        if self._gpu < 0:
            return
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        with torch.cuda.device(self._gpu):
            runtime: Any = torch.cuda.cudart()
            if not int(runtime.cudaHostRegister(self._address, len(self), 0)):
                self._pinned_by = os.getpid()
                return
            with suppress(RuntimeError):  # CUDA keeps the error, which the next kernel would raise
                torch.zeros(1, device="cuda")

    def __del__(self) -> None:
        # Before it is unmapped. A forked child cannot use CUDA, and at interpreter exit there is no need.
        if self._pinned_by == os.getpid() and not sys.is_finalizing():
            with torch.cuda.device(self._gpu):
                runtime: Any = torch.cuda.cudart()
                runtime.cudaHostUnregister(self._address)


def zeros(nbytes: int, device: torch.device | str = "cpu") -> Tensor:
    """Return ``uint8[nbytes]``, zero; pinned if it is in main memory and this process uses a GPU."""
    pinned = torch.device(device).type == "cpu" and torch.cuda.is_initialized()
    with torch.inference_mode(False):  # views of an inference tensor are inference tensors
        return torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
