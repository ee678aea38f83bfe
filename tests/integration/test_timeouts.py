"""Timeouts of any size."""

from __future__ import annotations

import math
import pickle
import threading
from typing import Any

import pytest
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import wsync


@pytest.fixture(params=[1e308, math.inf, 1e8])
def endless(request: pytest.FixtureRequest) -> float:
    """A timeout that means none."""
    return request.param


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return model


@pytest.mark.parametrize("name", ["shared_mem", "multiprocess", "distributed", "rpc", "ray", "none"])
def test_every_scheme_takes_an_endless_timeout(name: str, endless: float) -> None:
    with wsync.WeightSyncScheme.from_backend(name, timeout=endless) as scheme:
        assert scheme.timeout == (1e8 if endless == 1e8 else None)
        scheme.timeout = endless
    for wrong in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            wsync.WeightSyncScheme.from_backend(name, timeout=wrong)


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}, {"shared_memory": False, "inline_bytes": 0}])
def test_every_call_takes_an_endless_timeout(endless: float, options: dict[str, Any]) -> None:
    kind = wsync.DistributedWeightSyncScheme
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_worker = TCPStore("127.0.0.1", store.port, is_master=False)  # one client serves one call at a time
    with (
        kind(timeout=endless, store=store, **options) as sender,
        kind(timeout=endless, store=of_worker, **options) as worker,
    ):
        model = nn.Linear(2, 2)
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        worker.init_on_receiver("policy", model=model, worker_idx=0)
        connecting = threading.Thread(target=sender.connect)
        connecting.start()
        worker.connect()
        connecting.join()
        sender.send(model_of(2))
        assert worker.receive(endless) is not None and model.weight[0, 0] == 2
        sender.send_async(model_of(3))
        assert sender.wait_async() is not None
        worker.shutdown()
        again = pickle.loads(pickle.dumps(sender))
        again.init_on_receiver("policy", model=model, worker_idx=0)
        joining = threading.Thread(target=again.connect)
        joining.start()
        sender.readmit(0, timeout=endless)
        joining.join()
        assert model.weight[0, 0] == 3
        again.shutdown()
