"""The contract suite (``wsync.testing``) for every registered backend."""

from typing import ClassVar

from backends import (
    BuiltIn,
    Distributed,
    DistributedGloo,
    DistributedInline,
    Multiprocess,
    SharedMemory,
    SharedMemoryPublished,
)
from ray_workers import Ray
from rpc_workers import Rpc

from wsync import registered_backends
from wsync.testing import BackendContract

TRANSPORT_TESTS = (
    BackendContract.test_every_calling_form_delivers_every_kind_of_tensor,
    BackendContract.test_after_a_send_every_forward_uses_the_new_version,
    BackendContract.test_weights_can_differ_between_workers,
    BackendContract.test_an_update_that_arrives_in_a_forward_is_installed_when_that_ends,
    BackendContract.test_a_send_that_does_not_wait_copies_the_weights,
    BackendContract.test_no_forward_is_torn_while_the_trainer_sends,
    BackendContract.test_a_killed_worker_is_named_and_a_successor_joins_with_the_newest_version,
    BackendContract.test_a_death_wakes_a_send_that_waits,
    BackendContract.test_a_stopped_worker_times_out_and_catches_up_later,
    BackendContract.test_an_apply_that_raises_leaves_the_model_as_it_was,
    BackendContract.test_neither_model_is_installed_where_one_worker_cannot_prepare,
    BackendContract.test_close_ends_a_transfer_to_a_worker_that_does_not_read,
    BackendContract.test_close_ends_a_set_up_that_waits_for_a_worker,
)
"""The tests that depend on how weights travel: of a backend with ``QUICK``, ``make test`` runs no others."""


class TestSharedMemory(SharedMemory, BackendContract):
    pass


class TestSharedMemoryPublished(SharedMemoryPublished, BackendContract):
    QUICK: ClassVar = TRANSPORT_TESTS


class TestMultiprocess(Multiprocess, BackendContract):
    pass


class TestDistributed(Distributed, BackendContract):
    """Combines the parts of ``TestSharedMemory`` and ``TestDistributedGloo``."""

    QUICK: ClassVar = TRANSPORT_TESTS


class TestDistributedGloo(DistributedGloo, BackendContract):
    pass


class TestDistributedInline(DistributedInline, BackendContract):
    """All else is as in ``TestDistributedGloo``."""

    QUICK: ClassVar = TRANSPORT_TESTS
    SLOW: ClassVar = ()


class TestRpc(Rpc, BackendContract):
    QUICK: ClassVar = TRANSPORT_TESTS


class TestRay(Ray, BackendContract):
    """In ``make test`` only what ``QUICK`` names: the tests that kill actors take seconds each."""

    QUICK: ClassVar = (
        BackendContract.test_every_calling_form_delivers_every_kind_of_tensor,
        BackendContract.test_worker_ids_select_workers,
        BackendContract.test_weights_can_differ_between_workers,
        BackendContract.test_after_a_send_every_forward_uses_the_new_version,
        BackendContract.test_no_forward_is_torn_while_the_trainer_sends,
        BackendContract.test_an_apply_that_raises_leaves_the_model_as_it_was,
        BackendContract.test_a_killed_worker_is_named_and_a_successor_joins_with_the_newest_version,
        BackendContract.test_neither_model_is_installed_where_one_worker_cannot_prepare,
        BackendContract.test_nothing_is_left,
    )


def test_every_registered_backend_has_a_contract() -> None:
    tested = {
        value.name
        for value in globals().values()
        if isinstance(value, type) and issubclass(value, BuiltIn) and value is not BuiltIn
    }
    # Without workers that connect, or with a GPU: tests of their own.
    others = {"none", "ray_module_transform", "store", "http", "cuda"}
    assert tested == set(registered_backends()) - others
