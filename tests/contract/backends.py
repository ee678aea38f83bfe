"""The built-in backends and their variants, with what the contract suite asks of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
from full_disk import no_file_beyond

import wsync
from wsync.testing import Session
from wsync.testing.contract import resources
from wsync.testing.hooks import BackendHooks
from wsync.testing.workers import Worker, WorkerPool

MIB = 2**20
_BUILT = os.environ.get("WSYNC_NATIVE") != "0" and find_spec("wsync._native") is not None
needs_arena = pytest.mark.skipif(not _BUILT, reason="needs the compiled extension, for shared memory")


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


class SharedMemory(BuiltIn):
    name = "shared_mem"

    @contextmanager
    def starve(self, session: Session) -> Iterator[None]:
        if not _BUILT:
            pytest.skip("needs the compiled extension, for shared memory")
        with no_file_beyond(72 * MIB):  # two slots of a large model fit, and three are needed
            yield


class SharedMemoryPublished(SharedMemory):
    variant: ClassVar = {"acknowledge": "published"}


class Multiprocess(BuiltIn):
    name = "multiprocess"


class Distributed(BuiltIn):
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
