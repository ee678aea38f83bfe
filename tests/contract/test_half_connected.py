"""A worker that connects, and stops before it is set up; what is in the pickle of a scheme."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from tensordict import TensorDict
from torch import nn

import wsync
from wsync.control import Address, Connection
from wsync.testing import WorkerPool, commands
from wsync.testing.models import Small, digest, fill


class OverTcp(wsync.SocketRendezvous):
    """Of workers in other processes, and of the test itself."""

    address: Address

    def __init__(self) -> None:
        super().__init__("127.0.0.1")

    def open(self) -> tuple[Any, Address]:
        source, self.address = super().open()
        return source, self.address

    def only_dial(self) -> Connection:
        """Connect as worker 0, and do nothing more, as a worker that has been stopped."""
        return self.dial(self.address, "policy", 0, None)


class ArenaOverTcp(wsync.DistributedWeightSyncScheme):
    """Workers on this machine use the arena."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rendezvous = OverTcp()

    def create_rendezvous(self) -> Any:
        return self.rendezvous


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def test_a_worker_that_stops_after_it_was_accepted_is_named_and_another_one_connects(pool: WorkerPool) -> None:
    with pool.group(1) as workers, ArenaOverTcp(timeout=1.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 3.0), num_workers=1)
        stopped = scheme.rendezvous.only_dial()
        with pytest.raises(wsync.SyncTimeout, match="worker 0 was accepted, but did not answer: is it stopped") as late:
            scheme.connect()
        assert set(late.value.workers) == {0}
        stopped.close()
        scheme.timeout = 60.0
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        scheme.connect()
        workers.results()
        assert workers.call(commands.digest) == [digest(fill(Small(), 3.0))]
        assert workers.call(commands.shutdown) == [[]]


def test_a_scheme_for_workers_has_no_send_transform_which_may_be_a_lambda() -> None:
    with wsync.SharedMemWeightSyncScheme(send_transform=lambda weights: weights) as scheme:
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle.dumps(scheme)  # it may become a sender elsewhere
        scheme.init_on_sender("policy", model=nn.Linear(2, 2), num_workers=1)
        assert pickle.loads(pickle.dumps(scheme)).send_transform is None


def test_the_token_of_an_address_is_not_printed() -> None:
    assert "secret" not in repr(Address("127.0.0.1", 80, b"secret"))


def test_workers_that_pull_cannot_share_the_users_own_tensors() -> None:
    weights = TensorDict.from_module(Small()).data.clone().share_memory_()
    with pytest.raises(ValueError, match="workers pull: they cannot share the weights of 'policy'"):
        wsync.SharedMemWeightSyncScheme({"policy": weights}, initiator="receiver")
    with wsync.SharedMemWeightSyncScheme(initiator="receiver") as scheme:
        with pytest.raises(ValueError, match="they cannot share"):
            scheme.register_shared_weights("policy", weights)
        with pytest.raises(ValueError, match="they cannot share"):
            scheme.init_on_sender("policy", cached_weights=weights, num_workers=1)
