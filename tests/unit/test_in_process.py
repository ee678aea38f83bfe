"""Both ends in one process: several models are updated together, or none is, as in a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from torch import nn

import wsync


class Pair(nn.Module):
    """An actor and a critic; the output is one weight of each."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(64, 64), nn.Linear(64, 64)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)

    def forward(self) -> tuple[float, float]:
        return self.actor.weight[0, 0].item(), self.critic.weight[0, 0].item()


@contextmanager
def in_process(**models: nn.Module) -> Iterator[dict[str, wsync.WeightSyncScheme]]:
    with ExitStack() as running:
        schemes = {name: running.enter_context(wsync.SharedMemWeightSyncScheme()) for name in models}
        for name, scheme in schemes.items():
            scheme.init_in_process(name, models[name])
        yield schemes


def test_a_send_inside_the_gate_is_refused_at_once() -> None:
    acting = Pair()
    with in_process(policy=acting) as schemes:
        with wsync.gate(), pytest.raises(RuntimeError, match="outside any forward"):
            schemes["policy"].send(Pair(7))
        assert acting() == (0.0, 0.0)
        schemes["policy"].send(Pair(8))
        assert acting() == (8.0, 8.0)


def test_phases_add_up_to_the_latency() -> None:
    given = nn.Linear(200, 200)
    with in_process(first=nn.Linear(200, 200), second=nn.Linear(200, 200)) as schemes:
        reports = [schemes["first"].send(given), schemes["first"].send(given)]
        reports += wsync.synchronize(dict.fromkeys(schemes.values(), given)).values()
    for report in reports:
        assert report is not None and report.phases["apply"] > 0
        assert sum(report.phases.values()) == pytest.approx(report.seconds, rel=0.0, abs=1e-9), report


def test_no_forward_sees_one_model_new_and_the_other_old() -> None:
    acting, ended = Pair(), threading.Event()

    def update() -> None:
        for value in range(1, 300):
            new = Pair(value)
            wsync.synchronize({schemes["actor"]: new.actor, schemes["critic"]: new.critic})
        ended.set()

    with in_process(actor=acting.actor, critic=acting.critic) as schemes:
        seen = wsync.gated(acting)
        trainer = threading.Thread(target=update)
        trainer.start()
        forwards = []
        while not ended.is_set():
            forwards.append(seen())
        trainer.join()
        forwards.append(seen())
    assert forwards[-1] == (299.0, 299.0)
    assert [pair for pair in forwards if pair[0] != pair[1]] == []
