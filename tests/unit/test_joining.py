"""Joining the batches of workers in parts gives what torch.stack and torch.cat give."""

import pytest
import torch
from tensordict import TensorDict

from collectors.workers.joining import Joiner, join
from collectors.workers.pool import WorkerHandle


class Worker(WorkerHandle):
    """A worker of which only the batch is used."""

    sentinel = -1

    def __init__(self, index: int, *size: int) -> None:
        super().__init__(index)
        done = torch.randint(2, (*size, 1), dtype=torch.bool)
        step = TensorDict({"observation": torch.randn(*size, 3), "done": done}, size)
        self.batches = [TensorDict({"version": torch.randint(9, size), "next": step}, size)]


@pytest.mark.parametrize(
    ("how", "sizes"),
    [("stack", [(2, 4), (2, 4)]), (0, [(2, 4), (3, 4), (1, 4)]), (-2, [(2, 4), (3, 4)]), (-1, [(2, 4), (2, 5)])],
)
def test_a_batch_that_is_joined_as_its_shares_arrive_is_the_joined_batch(how, sizes):
    workers = [Worker(index, *size) for index, size in enumerate(sizes)]
    joiner = Joiner(workers, how)
    first, second = joiner.begin(), joiner.begin()
    for worker in reversed(workers):
        first.add(worker)
    expected = join([worker.batches[0] for worker in workers], how)
    workers[0].batches[0].zero_()  # the worker collects its next batch
    assert first.batch.batch_size == expected.batch_size
    assert (first.batch == expected).all()
    for worker in workers:
        second.add(worker)
    assert (second.batch == join([worker.batches[0] for worker in workers], how)).all()
    assert (first.batch == expected).all(), "each batch has memory of its own"
