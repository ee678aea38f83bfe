"""The contract suite (``wsync.testing``) for every registered backend."""

from __future__ import annotations

from typing import ClassVar

import pytest
from backends import BuiltIn, Distributed, DistributedGloo, Multiprocess, SharedMemory, SharedMemoryPublished
from ray_workers import Ray, RayObjectStore
from rpc_workers import Rpc

from wsync import registered_backends
from wsync.testing import BackendContract
from wsync.testing.delivery import Delivery
from wsync.testing.faults import Faults
from wsync.testing.restarts import Restarts
from wsync.testing.shutdowns import Shutdowns
from wsync.testing.transactions import Transactions
from wsync.testing.updates import Updates


class TestSharedMemory(SharedMemory, BackendContract):
    pass


class TestSharedMemoryPublished(SharedMemoryPublished, BackendContract):
    pass


class TestMultiprocess(Multiprocess, BackendContract):
    pass


class TestDistributed(Distributed, BackendContract):
    pass


class TestDistributedGloo(DistributedGloo, BackendContract):
    pass


class TestRpc(Rpc, BackendContract):
    pass


class TestRay(Ray, BackendContract):
    """In ``make test`` only what ``QUICK`` names: the tests that kill actors take seconds each."""

    QUICK: ClassVar = (
        Delivery.test_every_calling_form_delivers_every_kind_of_tensor,
        Delivery.test_worker_ids_select_workers,
        Delivery.test_weights_can_differ_between_workers,
        Updates.test_after_a_send_every_forward_uses_the_new_version,
        Updates.test_no_forward_is_torn_under_continuous_sends,
        Faults.test_an_apply_that_raises_leaves_the_model_as_it_was,
        Restarts.test_a_successor_joins_with_the_newest_version,
        Transactions.test_a_model_that_one_worker_refuses_is_installed_nowhere_nor_is_the_other,
        Shutdowns.test_nothing_is_left_after_shutdown,
    )


class TestRayObjectStore(RayObjectStore, BackendContract):
    """The parts of the contract that depend on how weights travel. All else is as in ``TestRay``."""

    QUICK: ClassVar = (
        Delivery.test_every_calling_form_delivers_every_kind_of_tensor,
        Updates.test_after_a_send_every_forward_uses_the_new_version,
        Transactions.test_a_model_that_one_worker_refuses_is_installed_nowhere_nor_is_the_other,
    )
    PARTS: ClassVar = (Delivery, Updates, Faults, Transactions)

    def test_refused_updates_leave_no_memory_behind(self) -> None:
        pytest.skip("pages of Ray's object store count as memory of each process that has touched them")


def test_every_registered_backend_has_a_contract() -> None:
    tested = {
        value.name
        for value in globals().values()
        if isinstance(value, type) and issubclass(value, BuiltIn) and value is not BuiltIn
    }
    others = {"none", "ray_module_transform", "store", "http"}  # without workers that connect: tests of their own
    assert tested == set(registered_backends()) - others
