"""Updates of at most ``FlatTransport.inline_bytes`` travel in the message that announces them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from workers_here import TIMEOUT, connect, make_worker, model_of, weights_of

import wsync


class Counting(wsync.DistributedTransport):
    """Counts what it has sent."""

    sent: ClassVar[list[int]] = []  # bytes

    def begin_send(self, flat: Tensor, transfers: list[Any]) -> None:
        self.sent.append(flat.numel())
        super().begin_send(flat, transfers)


class Scheme(wsync.DistributedWeightSyncScheme):
    def create_transport(self, worker_idx: int | None = None) -> Counting:
        return Counting(worker=worker_idx or 0, inline_bytes=self.inline_bytes)


def connected(
    stack: ExitStack, of_workers: int | None = None, **options: Any
) -> tuple[wsync.WeightSyncScheme, list[wsync.WeightSyncScheme]]:
    """A sender and two workers; ``of_workers``: their ``inline_bytes``, if they have another one."""
    Counting.sent.clear()
    sender = stack.enter_context(Scheme(timeout=TIMEOUT, shared_memory=False, **options))
    sender.init_on_sender("policy", model=model_of(1), num_workers=2)
    workers: list[Any] = [stack.enter_context(make_worker(sender, index, near=False)) for index in range(2)]
    for worker in workers:
        worker.inline_bytes = worker.inline_bytes if of_workers is None else of_workers
    connect(sender.connect, *workers)
    return sender, workers


@pytest.mark.parametrize(("limit", "transfers"), [(0, 2), (1, 2), (1 << 20, 0)])
@pytest.mark.parametrize("checksum", [True, False])
def test_only_larger_updates_are_given_to_the_transport(limit: int, transfers: int, checksum: bool) -> None:
    with ExitStack() as stack:
        sender, workers = connected(stack, inline_bytes=limit, checksum=checksum)
        assert len(Counting.sent) == transfers  # the first weights, in connect()
        for value in (2, 3):
            report = sender.send(model_of(value))
            assert [weights_of(worker) for worker in workers] == [[value, value]] * 2
            assert report is not None and report.bytes == 128
        assert len(Counting.sent) == 3 * transfers


@pytest.mark.parametrize("limits", [(0, 1 << 20), (1 << 20, 0)])
def test_the_limit_may_be_another_one_in_the_workers(limits: tuple[int, int]) -> None:
    with ExitStack() as stack:
        sender, workers = connected(stack, limits[1], inline_bytes=limits[0])
        for value in range(2, 6):
            sender.send(model_of(value))
            assert [weights_of(worker) for worker in workers] == [[value, value]] * 2
        wsync.synchronize({sender: model_of(7)})
        assert [weights_of(worker) for worker in workers] == [[7, 7]] * 2


def test_a_transaction_is_given_to_the_transport_and_small_updates_around_it_are_not() -> None:
    with ExitStack() as stack:
        sender, workers = connected(stack)
        for value in (2, 3):
            wsync.synchronize({sender: model_of(value)})
            assert [weights_of(worker) for worker in workers] == [[value, value]] * 2
            assert len(Counting.sent) == 2 * (value - 1)
            sender.send(model_of(value + 10))
            assert [weights_of(worker) for worker in workers] == [[value + 10, value + 10]] * 2
        assert len(Counting.sent) == 4


def test_an_update_that_does_not_fit_is_refused_and_the_next_one_is_installed() -> None:
    with ExitStack() as stack:
        sender, workers = connected(stack)
        workers[1].model.weight = torch.nn.Parameter(torch.zeros(1, 3))
        with pytest.raises(wsync.WorkerFailed, match="'weight'"):
            sender.send(model_of(2))
        workers[1].model.weight = torch.nn.Parameter(torch.zeros(1, 2))
        sender.send(model_of(3))
        assert [weights_of(worker) for worker in workers] == [[3, 3]] * 2
        assert not Counting.sent
