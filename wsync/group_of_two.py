"""Forming a process group of ``torch.distributed`` with two members: a sender and one worker."""

from __future__ import annotations

import hmac
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.deadlines import as_timedelta, remaining, time_until

_PROOF = "wsync proof "  # key in the store, with a rank: random bytes that the other rank sends over the group
_PROOF_SIZE = 32
_PROOF_TAG = 1
_PROOF_TIMEOUT = 5.0  # seconds; milliseconds are enough
_READY = "wsync ready "  # key in the store, with a rank
_NCCL_SETTINGS = {  # read when a group is made
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # no watchdog
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # a group of two sends one tensor at a time
}

_environment = threading.Lock()  # while a group is made


def gloo_group(store: TorchStore, rank: int, host: str, deadline: float | None) -> ProcessGroupGloo:
    """Return a group of two over gloo.

    gloo accepts any process that reaches its port in the short time while a group is formed. So both ends prove over
    the group, before any weights are sent, that they have what the other end has put into the store.

    Args:
        store: by which the two find each other; not used after this call.
        rank: 0 on the sender, 1 in the worker.
        host: this process's address, by which the other one reaches it.
        deadline: on ``time.monotonic``'s clock; None for none.

    Raises:
        ConnectionError: another process has connected to gloo's port in the other end's place.
        RuntimeError: the group could not be formed.
    """
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1  # sends and receives need no more
    options._timeout = time_until(deadline)
    group = ProcessGroupGloo(store, rank, 2, options)
    _exchange_proofs(store, group, rank, deadline)
    return group


def nccl_group(store: TorchStore, rank: int, device: torch.device, deadline: float | None) -> Any:
    """Return a group of two over NCCL, connected: later it could not be, without the store.

    NCCL waits for the other process without a deadline. So it begins when both processes have come this far.

    Args:
        store: by which the two find each other; not used after this call.
        rank: 0 on the sender, 1 in the worker.
        device: this process's GPU.
        deadline: on ``time.monotonic``'s clock; None for none.

    Raises:
        RuntimeError: the group could not be formed.
    """
    from torch.distributed import ProcessGroupNCCL  # only in builds for CUDA

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = time_until(None)  # deadlines are those of the scheme
    with torch.cuda.device(device):
        with _settings_of_nccl_groups():
            group: Any = cast(Any, ProcessGroupNCCL(store, rank, 2, options))
        byte = torch.zeros(1, dtype=torch.uint8, device=device)  # initialises CUDA
        store.set(_READY + str(rank), "")
        store.get(_READY + str(1 - rank))
        group.eager_connect_single_device(device)
        (group.send if rank == 0 else group.recv)([byte], 1 - rank, 0).wait(time_until(deadline))
        torch.cuda.current_stream().synchronize()
    return group


@contextmanager
def _settings_of_nccl_groups() -> Iterator[None]:
    """Have PyTorch give the NCCL groups that are made inside no watchdog thread, by environment variables.

    A watchdog that sees a transfer fail, as it does when the other process dies, ends this whole process a minute
    later. Here the scheme finds deaths and timeouts itself, and closes the group.
    """
    with _environment:
        before = {name: os.environ.get(name) for name in _NCCL_SETTINGS}
        os.environ.update(_NCCL_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _exchange_proofs(store: TorchStore, group: Any, rank: int, deadline: float | None) -> None:
    """Send over a new group of two what the other end has put into the store, and check that it does so too.

    Each end puts its value into the store when its half of the group is formed, so the values travel at once.

    Raises:
        ConnectionError: the other end does not.
        RuntimeError: it has not formed its half.
    """
    own, other = secrets.token_bytes(_PROOF_SIZE), 1 - rank
    store.set(_PROOF + str(rank), own)  # pyright: ignore[reportArgumentType]  bytes are taken as well
    given = torch.frombuffer(bytearray(store.get(_PROOF + str(other))), dtype=torch.uint8)
    shown = torch.zeros(_PROOF_SIZE, dtype=torch.uint8)
    transfers = [group.send([given], other, _PROOF_TAG), group.recv([shown], other, _PROOF_TAG)]
    left = remaining(deadline)
    limit = as_timedelta(_PROOF_TIMEOUT if left is None else max(min(left, _PROOF_TIMEOUT), 0.001))
    try:
        for transfer in transfers:
            transfer.wait(limit)
        proven = hmac.compare_digest(shown.numpy().tobytes(), own)
    except RuntimeError:
        proven = False
    if not proven:
        raise ConnectionError(
            "what is connected to gloo's port did not prove that it is the other end: has another process connected?"
        )
