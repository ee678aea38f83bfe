"""Engines and workers that switch together (``wsync.synchronize``): all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from http_engines import engines, refuse_next, start_engine, stop_engine, trainer, value

import wsync
from wsync.engine.client import BodyTransfer
from wsync.testing import WorkerPool, commands
from wsync.testing.models import Small, fill


@contextmanager
def fleet(pool: WorkerPool) -> Iterator[tuple[Any, list[str], Any, Callable[[float], Any], Callable[[], list[Any]]]]:
    """Two engines of a trainer, and a worker that has another model; what sends both, and what they have."""
    critic = wsync.MultiProcessWeightSyncScheme(timeout=30.0)
    with engines(pool, 2) as (servers, urls), pool.group(1) as actors, trainer(urls) as scheme, critic:
        critic.init_on_sender("critic", model=fill(Small(), 1), num_workers=1)
        actors[0].start(commands.join, critic, Small, 0, "critic")
        critic.connect()
        actors[0].result()

        def send(number: float) -> Any:
            return wsync.synchronize({scheme: fill(Small(), number), critic: fill(Small(), number)})

        def values() -> list[Any]:
            return [*(one[1][0] for one in servers.call(value)), *actors[0].call(commands.output, "critic")[:1]]

        yield servers, urls, scheme, send, values


def at_the(step: str, engine: int, urls: list[str], act: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Have ``act`` called after an engine has prepared, or before it commits."""
    usual = getattr(BodyTransfer, step)

    def take(transfer: Any) -> None:
        mine = transfer._client.url == urls[engine]
        if mine and step == "commit":
            act()
        usual(transfer)
        if mine and step == "prepare" and transfer._source.update.undecided:
            act()

    patch.setattr(BodyTransfer, step, take)


def test_all_switch_and_an_engine_that_fails_before_the_decision_leaves_all_with_the_old_version(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(pool) as (servers, urls, scheme, send, values):
        reports = send(2)
        assert reports["policy"].version == reports["critic"].version == 2 and values() == [2.0] * 3
        servers[0].call(stop_engine)  # started again, it refuses
        servers[0].call(start_engine, int(urls[0].rsplit(":", 1)[1]))
        with pytest.raises(wsync.WorkerFailed, match=rf"applied nowhere(?s:.*){urls[0]}: phase start .*readmitted"):
            send(3)
        scheme.readmit(0)
        assert values() == [2.0] * 3
        scheme.timeout = 1.0
        servers[1].stop()
        with pytest.raises(wsync.SyncTimeout, match=rf"applied nowhere(?s:.*)worker 1: {urls[1]}: phase start"):
            send(4)
        servers[1].resume()
        scheme.timeout = 30.0
        assert values() == [2.0] * 3
        with monkeypatch.context() as patch:
            at_the("prepare", 1, urls, servers[1].kill, patch)
            scheme.send_async(fill(Small(), 7))  # the update that is aborted does not take its place
            with pytest.raises(wsync.WorkerDied, match=rf"applied nowhere(?s:.*)worker 1: {urls[1]}: phase health"):
                send(5)
        assert values() == [7.0, 2.0]  # of those that live
        send(6)
        assert values() == [6.0] * 2
        servers.replace(1).call(start_engine, int(urls[1].rsplit(":", 1)[1]))
        scheme.readmit(1)
        assert values() == [6.0] * 3


def test_what_fails_after_the_decision_is_named_and_the_others_switch(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(pool) as (servers, urls, scheme, send, values):
        servers[0].call(refuse_next)
        with pytest.raises(wsync.WorkerFailed, match=rf"was committed(?s:.*){urls[0]}: phase finish(?s:.*)refuses"):
            send(2)
        assert values() == [1.0, 2.0, 2.0]
        with monkeypatch.context() as patch:
            at_the("commit", 0, urls, servers[0].kill, patch)
            with pytest.raises(wsync.WorkerDied, match=rf"was committed(?s:.*)worker 0: {urls[0]}: phase finish"):
                send(3)
        assert values() == [3.0] * 2
        servers.replace(0).call(start_engine, int(urls[0].rsplit(":", 1)[1]))
        scheme.readmit(0)
        assert values() == [3.0] * 3
        scheme.send(fill(Small(), 4))
        assert values() == [4.0, 4.0, 3.0]
