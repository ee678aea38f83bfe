"""By RPC no socket tells a worker that waits to be let in that its trainer has gone; it hears of it all the same."""

from __future__ import annotations

from typing import Any

import pytest
from census import census
from contract_models import Small
from crew import Host, RemoteError, crew

import wsync
from wsync.deadlines import deadline_in, wait_readable
from wsync.network import rpc_worker

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("make_scheme", ["rpc"], indirect=True)]


def test_a_trainer_that_shuts_down(make_scheme: Any) -> None:
    with crew(1) as workers:
        before = 0
        for _ in range(2):  # what the machinery around it makes once, it keeps
            before = census()["descriptors"]
            with make_scheme(timeout=20.0) as scheme:
                scheme.init_on_sender("policy", model=Small(), num_workers=1)
                workers[0].start("join", scheme, Small, 0, "policy")
                assert wait_readable([scheme._role.end._lines._door.fileno()], deadline_in(20.0))
            with pytest.raises(RemoteError, match="the sender went away"):
                workers[0].result()
        assert census()["descriptors"] == before


def train(host: Host) -> wsync.WeightSyncScheme:
    """In a worker: be a trainer that lets nobody in."""
    scheme = host.schemes["policy"] = wsync.RPCWeightSyncScheme(timeout=None, trainer=own_name())
    scheme.init_on_sender("policy", model=Small(), num_workers=1)
    return scheme


def own_name() -> str:
    from torch.distributed import rpc

    return rpc.get_worker_info().name


def knock(host: Host, scheme: wsync.WeightSyncScheme) -> None:
    host.init(scheme, Small, 0, "policy")
    scheme.receiver.knock(0, None)


def go_on(host: Host) -> None:
    host.schemes["policy"].receiver.connect(0, 15.0)


def test_a_trainer_that_dies(make_scheme: Any) -> None:
    with crew(2) as workers:
        workers[0].call("run", knock, workers[1].call("run", train))
        workers[0].start("run", go_on)
        workers[1].kill()
        with pytest.raises(RemoteError, match="the sender went away"):
            workers[0].result()


def test_a_trainer_that_is_stopped_is_waited_for_until_the_deadline(make_scheme: Any) -> None:
    with crew(2) as workers:
        scheme = workers[1].call("run", train)
        scheme.timeout = 0.3
        workers[1].stop()
        with pytest.raises(RemoteError, match=r"the sender 'worker[0-9]+' did not answer in time") as late:
            workers[0].call("join", scheme, Small, 0, "policy")
        assert late.value.kinds[0] == "SyncTimeout"
        workers[1].resume()


def test_a_trainer_that_is_stopped_for_a_while_lets_workers_in_afterwards(make_scheme: Any) -> None:
    with crew(2) as workers:
        scheme = workers[1].call("run", train)
        workers[1].stop()
        workers[0].call("run", have_no_patience_with_calls)
        workers[0].start("join", scheme, Small, 0, "policy")
        assert not workers[0].pipe.poll(1.0), "no call takes that long, but there is no deadline"
        workers[1].resume()
        workers[1].call("connect")
        assert workers[0].result() == 0


def have_no_patience_with_calls(host: Host) -> None:
    rpc_worker._GOODBYE = 0.1
