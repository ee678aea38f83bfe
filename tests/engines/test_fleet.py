"""Two vLLM servers and an engine of ``engine_app`` that switch together: one is killed, or stopped, in each phase."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from http_engines import TOKEN, engines, loaded, start_engine
from stock_vllm import Server, make

import wsync
from wsync.engine.client import EngineClient
from wsync.testing import WorkerPool

pytest.importorskip("vllm", reason="there is no vLLM here: `make engines` makes an environment that has it")
PROMPT = [5, 9, 11, 40, 77, 200, 31]
DEADLINE = 8.0  # seconds for a version, where an engine is stopped
PHASES = {
    "wsync": ["before", "pause", "start", "update", "load", "finish", "resume"],
    "disk": ["prepare", "update", "load", "finish"],
    "app": ["start", "update", "finish"],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize(("kind", "phase"), [(kind, phase) for kind, phases in PHASES.items() for phase in phases])
def test_one_of_three_engines(
    server: Server, another: Callable[[], Server], pool: WorkerPool, kind: str, phase: str, sign: Any,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is named in time, all others have switched or none has, no mixture is served, the next send repairs it."""
    second, killed = another(), sign == signal.SIGKILL
    decided = phase in ("load", "finish", "resume") or (kind, phase) == ("disk", "update")
    options: Any = {"transfer": "disk", "folder": tmp_path} if kind == "disk" else {"transfer": "wsync"}
    with (
        engines(pool, 1) as (own, (url,)),
        wsync.HTTPWeightSyncScheme(url, token=TOKEN, timeout=300.0) as other,
        wsync.HTTPWeightSyncScheme([server.url, second.url], timeout=300.0, **options) as scheme,
    ):
        for name, one in {"policy": scheme, "other": other}.items():
            one.init_on_sender(name, model=make(81))
            one.connect()
        at_fault, index, where = (other, 0, url) if kind == "app" else (scheme, 1, second.url)
        usual, asked, at = EngineClient.post, list[str](), list[float]()

        def send(number: int) -> None:
            wsync.synchronize({scheme: make(number), other: make(number)})

        def signal_it(sign: int) -> None:
            os.kill(own[0].pid if kind == "app" else second.core(), sign)

        def post(client: EngineClient, now: str, *args: Any) -> Any:
            if client.url == where and not at:
                asked.append("load" if now == "update" and now in asked else now)
                if asked[-1] == phase:
                    at.append(time.perf_counter())
                    signal_it(sign)
            return usual(client, now, *args)

        def has(engine: Any, number: int) -> bool:
            model = make(number)
            if isinstance(engine, Server):
                return not engine.paused() and engine.serves(model, PROMPT)
            found = engine.call(loaded)
            return all(torch.equal(tensor, found[name]) for name, tensor in model.named_parameters())

        send(82)
        monkeypatch.setattr(EngineClient, "post", post)
        scheme.timeout = other.timeout = 300.0 if killed else DEADLINE
        named = {"load": "update", "before": "(publish|pause)"}.get(phase, phase)
        happened = "was committed" if decided else "applied nowhere"
        if phase == "before":
            at.append(time.perf_counter())
            signal_it(sign)
        try:
            with pytest.raises(
                wsync.WorkerDied if killed else wsync.SyncTimeout,
                match=rf"{happened}(?s:.*)worker {index}: {where}: phase {named}",
            ):
                send(83)
            took, began = time.perf_counter() - at[0], time.perf_counter()
        finally:
            if not killed:
                signal_it(signal.SIGCONT)
        survivors = [server, second if kind == "app" else own[0]]
        assert [has(one, 83 if decided else 82) for one in survivors] == [True, True] and took < DEADLINE + 4
        scheme.timeout = other.timeout = 300.0
        failed = own[0] if kind == "app" else second
        if killed:
            if kind == "app":
                own[0].kill()  # so that the pool knows
                failed = own.replace(0)
                failed.call(start_engine, int(where.rsplit(":", 1)[1]))
            else:
                second = failed = another()
            began = time.perf_counter()
            at_fault.readmit(index)
            assert has(failed, 83 if decided else 82)
        else:
            assert (kind != "app" and second.paused()) or has(failed, 82) or has(failed, 83)
        send(84)
        print(f"{kind}, {phase}: named after {took:.1f} s; repaired after {time.perf_counter() - began:.1f} s")
        assert all(has(one, 84) for one in (server, second, own[0]))
