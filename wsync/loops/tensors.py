"""Which tensors are plain bytes in main memory, which are sharded, which are tied, and copying."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from wsync.errors import LayoutMismatch

PLAIN_TYPES = (nn.Parameter, Tensor)
"""Only these: a subclass of Tensor may keep its numbers elsewhere."""

_SHOWN = 8  # names in an error
_GATHER = (
    "call torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on every rank, and send its result from rank 0"
)
_RECEIVE = "use a model that is not sharded, or a function (load=) that distributes the weights that it is given"


def copy_all(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its destination by PyTorch, without recording it for autograd.

    With a GPU, all copies are started at once, on the current stream; on return they have ended.
    """
    gpus = _gpus(destinations) | _gpus(sources)
    with torch.no_grad():
        torch._foreach_copy_(list(destinations), list(sources), bool(gpus))  # pyright: ignore[reportPrivateImportUsage]
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()


def copy_into_model(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``copy_all`` into the tensors of a model that no forward uses.

    On a GPU, the kernels of a forward may run after the forward has returned, on any stream: they are waited for.
    """
    for gpu in _gpus(destinations):
        torch.cuda.synchronize(gpu)
    copy_all(destinations, sources)


def _gpus(tensors: Sequence[Tensor]) -> set[torch.device]:
    if not torch.cuda.is_initialized():
        return set()
    return {tensor.device for tensor in tensors if tensor.is_cuda}


def tie_leaders(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the index of the first one that it is tied to: that has the same memory and form.

    An empty tensor is tied to none: all of them have address 0.
    """
    first: dict[tuple[object, ...], int] = {}
    return [first.setdefault(_tie_key(one), index) if one.numel() else index for index, one in enumerate(tensors)]


def _tie_key(one: Tensor) -> tuple[object, ...]:
    """Return what is equal for tied tensors. A lazily conjugated or negated view has the memory of its base."""
    return one.device, one.data_ptr(), one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg()


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor. Its class is not imported for this: that would take half a second."""
    return type(tensor) not in PLAIN_TYPES and hasattr(type(tensor), "full_tensor")


def require_whole(names: Iterable[str], tensors: Iterable[Tensor], receiving: str = "") -> None:
    """Check that no tensor is sharded over ranks, as FSDP2 and tensor parallelism have it.

    Args:
        names: the names of the tensors.
        tensors: weights to be sent, or those of ``receiving``.
        receiving: what receives weights, for the error.

    Raises:
        LayoutMismatch: some are; names them.
    """
    sharded = [f"'{name}'" for name, tensor in zip(names, tensors, strict=True) if is_sharded(tensor)]
    if sharded:
        shown = ", ".join(sharded[:_SHOWN]) + (f" and {len(sharded) - _SHOWN} more" if len(sharded) > _SHOWN else "")
        raise LayoutMismatch(
            f"only whole tensors can be carried, and this rank has only a shard of {shown} of "
            f"{receiving or 'these weights'} (DTensor): {_RECEIVE if receiving else _GATHER}"
        )


def is_plain(tensor: object) -> bool:
    """Whether ``tensor`` is a real, strided tensor in main memory that is stored as it is read."""
    return (
        type(tensor) in PLAIN_TYPES
        and isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_complex()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]
    )


def is_like(tensor: object, like: Tensor) -> bool:
    """Whether ``tensor`` is plain and has the dtype, shape and strides of ``like``, so that a copy is one of bytes."""
    return (
        is_plain(tensor)
        and isinstance(tensor, Tensor)
        and tensor.dtype is like.dtype
        and tensor.shape == like.shape
        and all(
            size < 2 or stride == expected
            for size, stride, expected in zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
        )
    )
