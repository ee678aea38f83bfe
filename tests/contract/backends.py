"""The built-in backends and their variants, with what the contract suite asks of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

import wsync
from wsync.testing import Session
from wsync.testing.contract import resources
from wsync.testing.hooks import BackendHooks
from wsync.testing.workers import Worker, WorkerPool

MIB = 2**20


class BuiltIn(BackendHooks):
    """A registered backend.

    Attributes:
        name: in the registry.
        variant: options of its scheme.
    """

    name: ClassVar[str]
    variant: ClassVar[dict[str, Any]] = {}

    def make_scheme(self, **options: Any) -> wsync.WeightSyncScheme:
        return wsync.WeightSyncScheme.from_backend(self.name, **self.variant, **options)


class InSharedMemory(BuiltIn):
    """A backend with updates that lie in shared memory of the trainer's."""

    checksum_options: ClassVar[dict[str, Any]] = {"checksum": True}

    def corrupt(self, session: Session) -> None:
        flip_in_shared_memory(session.model.weight)


class SharedMemory(InSharedMemory):
    name = "shared_mem"

    @contextmanager
    def starve(self, session: Session) -> Iterator[None]:
        with no_file_beyond(72 * MIB):  # two slots of a large model fit, and three are needed
            yield


class SharedMemoryPublished(SharedMemory):
    variant: ClassVar = {"acknowledge": "published"}
    acknowledged = False


class Multiprocess(InSharedMemory):
    name = "multiprocess"


class Distributed(InSharedMemory):
    name = "distributed"


class DistributedGloo(BuiltIn):
    name = "distributed"
    variant: ClassVar = {"shared_memory": False, "inline_bytes": 0}


class DistributedInline(BuiltIn):
    name = "distributed"
    variant: ClassVar = {"shared_memory": False}


class Cuda(BuiltIn):
    name = "cuda"


class OwnHosts(WorkerPool):
    """Processes that NCCL takes for different machines: two of one machine must not use the same GPU."""

    def start_workers(self, count: int) -> list[Worker]:
        workers = super().start_workers(count)
        for worker in workers:
            worker.call(be_a_machine)
        be_a_machine()
        return workers


def be_a_machine(state: object = None) -> None:
    """Have NCCL take this process for a machine of its own; without effect once NCCL is in use."""
    os.environ["NCCL_HOSTID"] = f"machine {os.getpid()}"


class DistributedNccl(BuiltIn):
    name = "distributed"
    variant: ClassVar = {"backend": "nccl"}
    pool_type = OwnHosts
    connects_within = 10.0

    def trainer_resources(self) -> dict[str, Any]:
        """Without descriptors: NCCL leaves one or two sockets open for each worker that was killed."""
        return {name: value for name, value in resources().items() if name != "descriptors"}


PROCESS_BACKENDS: dict[str, type[BuiltIn]] = {
    "shared_mem": SharedMemory,
    "shared_mem-published": SharedMemoryPublished,
    "multiprocess": Multiprocess,
    "distributed": Distributed,
    "distributed-gloo": DistributedGloo,
    "distributed-inline": DistributedInline,
}
"""Those with plain processes as their workers."""


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Have the kernel refuse files (memory files, too) of more than ``size`` bytes, as where there is no room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def flip_in_shared_memory(tensor: torch.Tensor) -> None:
    """Flip one bit wherever the bytes of ``tensor`` lie in a memory file that wsync has mapped in this process."""
    pattern = tensor.detach().numpy().tobytes()
    found = set[tuple[str, int]]()  # file and offset: a file may be mapped twice
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, offset, _, inode, *name = line.split()
            if "wsync" not in "".join(name) or "rw" not in permissions:
                continue
            start, end = (int(address, 16) for address in addresses.split("-"))
            memory.seek(start)
            content = memory.read(end - start)
            at = content.find(pattern)
            while at >= 0:
                place = inode, int(offset, 16) + at
                if place not in found:
                    memory.seek(start + at)
                    memory.write(bytes([content[at] ^ 1]))
                    found.add(place)
                at = content.find(pattern, at + len(pattern))
    assert found, "the update does not lie in shared memory"
