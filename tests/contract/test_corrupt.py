"""Bytes that changed on their way are noticed before they are staged or installed, in every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from contract_models import Small, Tail, fill
from crew import crew
from torch import Tensor

import wsync
from wsync.local import arena
from wsync.network import fast_sender as group_fast_sender
from wsync.network import lanes
from wsync.wire.checksum import checksum_of, seal

pytestmark = pytest.mark.timeout(60)
CORRUPT = r"arrived corrupt \(checksum [0-9a-f]{16}, not [0-9a-f]{16}\): nothing was applied"


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has one bit of the next update differ from what its checksum is of."""
    armed: list[bool] = []

    def then_flip(flat: Tensor, extra: bytes) -> int:
        checksum = checksum_of(flat, extra)
        if armed:
            armed.clear()
            flat[2] ^= 1
        return checksum

    def of_another(content: Any) -> bytes:
        content = content.copy()
        if armed:
            armed.clear()
            content[2] ^= 1
        return seal(content)

    for module in (arena, lanes):
        monkeypatch.setattr(module, "checksum_of", then_flip)
    monkeypatch.setattr(group_fast_sender, "seal", of_another)  # it comes after the data
    return lambda: armed.append(True)


@pytest.mark.above_the_ends
def test_a_corrupt_update_is_applied_nowhere(make_scheme: Any, spoil: Callable[[], None]) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, make_scheme(checksum=True) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        scheme.send(fill(model, 2))
        before = workers.all("digest")
        spoil()
        if scheme._published:
            scheme.send(fill(model, 3))  # nobody answers
            assert workers.all("digest") == before
        with pytest.raises(wsync.WorkerFailed, match=rf"(?s)worker 0.*update \d {CORRUPT}.*worker 1") as failed:
            scheme.send(fill(model, 4))
        assert set(failed.value.workers) == {0, 1}
        if not scheme._published:
            assert workers.all("digest") == before
        for value in range(5, 9):
            scheme.send(fill(model, value))
            assert [seen[0] for seen in workers.all("forward")] == [value] * 2


@pytest.mark.above_the_ends
def test_corrupt_first_weights(make_scheme: Any, spoil: Callable[[], None]) -> None:
    with crew(1) as workers, make_scheme(checksum=True) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        spoil()
        with pytest.raises(wsync.WorkerFailed, match=CORRUPT):
            if scheme.delivers_at_connect:
                workers[0].start("join", scheme, Small, 0, "policy")
                scheme.connect()
            else:
                workers.follow(scheme, Small)


@pytest.mark.above_the_ends
def test_all_or_nothing(make_scheme: Any, spoil: Callable[[], None]) -> None:
    actor, critic = fill(Tail(), 1), fill(Tail(), 1)
    with crew(2) as workers, make_scheme(checksum=True) as first, make_scheme(checksum=True) as second:
        for scheme, model, name in ((first, actor, "actor"), (second, critic, "critic")):
            scheme.init_on_sender(name, model=model, num_workers=2)
            workers.follow(scheme, Tail, name)
        before = workers.all("digest", "actor"), workers.all("digest", "critic")
        spoil()
        with pytest.raises(wsync.WorkerFailed, match=CORRUPT):
            wsync.synchronize({first: fill(actor, 2), second: fill(critic, 2)})
        assert (workers.all("digest", "actor"), workers.all("digest", "critic")) == before
        wsync.synchronize({first: fill(actor, 3), second: fill(critic, 3)})
        for name in ("actor", "critic"):
            assert [seen[0] for seen in workers.all("forward", name)] == [3, 3]


def test_what_an_idle_worker_is_bound_to_outlives_newer_updates(spoil: Callable[[], None]) -> None:
    """Published updates that it never used lie in other slots than the one it falls back on."""
    model = fill(Small(), 1)
    with crew(2) as workers, wsync.SharedMemWeightSyncScheme(acknowledge="published", checksum=True) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        scheme.send(fill(model, 2))
        assert workers.all("forward") == [[2.0] * 4] * 2
        for value in range(3, 9):
            scheme.send(fill(model, value))
        assert workers[1].call("forward") == [8.0] * 4
        spoil()
        scheme.send(fill(model, 9))
        assert workers.all("forward") == [[2.0] * 4, [8.0] * 4]


@pytest.mark.parametrize("checksum", [True, False])
def test_a_byte_that_changes_in_shared_memory(checksum: bool) -> None:
    """Nothing in this process is in on it; and without a checksum the worker acts on it."""
    model = fill(Small(), 1)
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme(checksum=checksum) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        workers[0].stop()
        scheme.send_async(fill(model, 2))
        transport = scheme.shared_transport
        assert transport is not None
        transport.unique_weights[0]["weight"][1] = 77.0
        workers[0].resume()
        if checksum:
            with pytest.raises(wsync.WorkerFailed, match=CORRUPT):
                scheme.wait_async()
        else:
            scheme.wait_async()
        assert workers[0].call("forward")[:2] == ([1.0, 1.0] if checksum else [2.0, 77.0])
