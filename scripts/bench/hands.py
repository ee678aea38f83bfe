"""The worker's end of a standalone send: it forwards when it is told to, and says what it saw."""

from __future__ import annotations

import os
import select
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import cloudpickle
import torch
from torch import nn

from bench.cases import Case, Pauses
from bench.models import Revealing

Follow = Callable[[Connection, nn.Module, int], Callable[[], None]]
"""Waits for the trainer's word, connects the worker of this index and its model to it; returns what undoes that."""
_QUIET = 0.2  # seconds of forwards without any update, to know how long one takes
_PATIENCE = 0.01  # seconds between two looks whether the trainer has said something
_CHUNK = 1000  # forwards whose outputs are kept as they are: to read one lets other threads in, too


def meet(line: Connection, case: Case, worker: int, follow: Follow) -> None:
    """Say that this worker is there, follow the trainer, and obey until it has had enough."""
    model = Revealing(case.mib, case.tensors, -1.0)
    line.send(os.getpid())
    leave = follow(line, model, worker)
    line.send("connected")
    obey(line, model)
    leave()
    line.send("left")


def follow_pickled(line: Connection, model: nn.Module, worker: int) -> Callable[[], None]:
    """Follow by the scheme that the trainer sends."""
    scheme = cloudpickle.loads(line.recv_bytes())
    scheme.init_on_receiver("policy", model=model, worker_idx=worker)
    scheme.connect()
    return scheme.shutdown


def obey(line: Connection, model: nn.Module) -> None:
    """Do what the trainer says until it says ``leave``: ``look``, or ``act`` until the next word."""
    while (word := line.recv()) != "leave":
        if word == "look":
            low, high = model().tolist()
            line.send((low, high))
        else:
            act(line, model)


def act(line: Connection, model: nn.Module) -> None:
    """Forward in a tight loop: without updates first, then with them until the trainer says something."""
    poller = select.poll()
    poller.register(line.fileno(), select.POLLIN)
    look_at = 0

    def told(now: int) -> bool:
        nonlocal look_at
        if now < look_at:  # to look lets other threads in, which is not what is to be measured
            return False
        look_at = now + int(_PATIENCE * 1e9)
        return bool(poller.poll(0))

    def forwards(ended: Callable[[int], bool]) -> tuple[list[int], list[list[float]]]:
        gaps, seen, last = [], [torch.empty(0, 2)], time.perf_counter_ns()
        while not ended(last):
            seen.append(model(False)[None])
            if len(seen) > _CHUNK:
                seen = [torch.cat(seen)]
            now = time.perf_counter_ns()
            gaps.append(now - last)
            last = now
        return gaps, torch.cat(seen).tolist()

    until = time.perf_counter_ns() + int(_QUIET * 1e9)
    quiet, _ = forwards(lambda now: told(now) or now > until)
    line.send("acting")
    gaps, seen = forwards(told)
    line.recv()
    steps = list(zip(gaps[1:], seen, seen[1:], strict=False))
    line.send(
        Pauses(
            usual=statistics.median(quiet) / 1e9,
            usual_longest=max(quiet) / 1e9,
            switches=tuple(gap / 1e9 for gap, (_, before), (_, after) in steps if after != before),
            longest=max(gaps, default=0) / 1e9,
            forwards=len(gaps),
            mixed=sum(low != high for low, high in seen),
            backwards=sum(after < before for _, (before, _), (after, _) in steps),
        )
    )
