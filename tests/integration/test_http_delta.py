"""Differences over HTTP: what travels, that the result is exact, and what happens where there is no base."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from http_engines import TOKEN, EngineServer, engines, refuse_next, start_engine, stop_engine, trainer
from torch import Tensor, nn

import wsync
from wsync.checksum import checksum_of
from wsync.control.settings import SenderSettings
from wsync.engine import protocol
from wsync.engine.differences import Base, Differences, range_of
from wsync.testing import WorkerPool
from wsync.testing.asgi import serve
from wsync.testing.commands import WorkerState
from wsync.transforms import Cast, Delta
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, packed
from wsync.weights.snapshot import snapshot
from wsync.weights.tensor_file import dump_tensors

pytest.importorskip("zstandard", reason="the extra [delta] is not installed")


class Policy(nn.Module):
    """Two layers, tied ends, an empty tensor, integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.Sequential(nn.Linear(32, 96), nn.Linear(96, 32), nn.BatchNorm1d(32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.empty(0))


def step(model: nn.Module, lr: float = 1e-4) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += lr * torch.randn_like(parameter)


def digest(weights: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def expected(model: nn.Module) -> str:
    return digest(Cast("bfloat16")(model.state_dict()))


def loaded(state: WorkerState) -> str:
    with wsync.gate():
        return digest(state.kept["loaded"])


@contextmanager
def sender(urls: Any, model: nn.Module, **options: Any) -> Iterator[wsync.HTTPWeightSyncScheme]:
    with trainer(urls, model, send_transform=[Cast("bfloat16"), Delta()], **options) as scheme:
        yield scheme


def sent_bytes(scheme: wsync.HTTPWeightSyncScheme) -> int:
    """Send; return how many bytes an engine was sent."""
    report = scheme.send()
    assert report is not None
    return report.bytes


@pytest.mark.parametrize("chunk_bytes", [1, 4096, 1 << 20])
def test_every_version_is_exact_and_smaller(pool: WorkerPool, chunk_bytes: int) -> None:
    model = Policy()
    full = Layout.of(snapshot(Cast("bfloat16")(model.state_dict()))).nbytes
    with engines(pool, 2) as (workers, urls), sender(urls, model, chunk_bytes=chunk_bytes) as scheme:
        assert workers.call(loaded) == [expected(model)] * 2
        for _ in range(4):
            step(model)
            assert 0 < sent_bytes(scheme) < 0.5 * full
            assert workers.call(loaded) == [expected(model)] * 2
        model.load_state_dict({name: random_bytes_like(one) for name, one in model.state_dict().items()})
        assert sent_bytes(scheme) > 0.95 * full  # everything differs, so the tensors travel
        assert workers.call(loaded) == [expected(model)] * 2


def random_bytes_like(tensor: Tensor) -> Tensor:
    return torch.randint(256, (tensor.nbytes,), dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def test_an_engine_without_the_base_gets_the_full_version(pool: WorkerPool) -> None:
    model = Policy()
    with engines(pool, 2) as (workers, urls), sender(urls, model) as scheme:
        step(model)
        small = sent_bytes(scheme)
        workers[1].call(stop_engine)
        workers[1].call(start_engine, int(urls[1].rsplit(":", 1)[1]))
        step(model)
        assert sent_bytes(scheme) > 2 * small  # engine 1 has been started again
        assert workers.call(loaded) == [expected(model)] * 2
        workers[0].call(refuse_next)
        step(model)
        with pytest.raises(wsync.WorkerFailed, match="the engine refuses"):
            scheme.send()
        step(model)
        assert sent_bytes(scheme) > 2 * small  # engine 0 has not said that it has the version before
        assert workers.call(loaded) == [expected(model)] * 2
        step(model)
        assert sent_bytes(scheme) < 1.5 * small
        assert workers.call(loaded) == [expected(model)] * 2


def test_versions_for_some_engines(pool: WorkerPool) -> None:
    """Each engine has a base of its own."""
    model = Policy()
    with engines(pool, 2) as (workers, urls), sender(urls, model) as scheme:
        for worker_ids in ([0], [0], [1], [0, 1], [1]):
            step(model)
            scheme.send(worker_ids=worker_ids)
            found = workers.call(loaded)
            assert all(found[worker] == expected(model) for worker in worker_ids)
        for _ in range(3):
            step(model)
            scheme.send_async()
        scheme.wait_async()
        assert workers.call(loaded) == [expected(model)] * 2


def test_engines_that_have_different_weights_of_one_version(pool: WorkerPool) -> None:
    first, second, both = Policy(), Policy(), Policy()
    with engines(pool, 2) as (workers, urls), sender(urls, Policy()) as scheme:
        for model in (first, second, both):
            step(model)
        scheme.send({0: first, 1: second})
        assert workers.call(loaded) == [expected(first), expected(second)]
        scheme.send(both)
        assert workers.call(loaded) == [expected(both)] * 2


def test_a_damaged_difference_is_refused_and_the_full_version_follows() -> None:
    model, state, target = Policy(), dict[str, Any](), dict[str, Tensor]()
    app = wsync.engine_app(load=lambda pairs: target.update({name: one.clone() for name, one in pairs}), token=TOKEN)

    async def damaging(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        async def changed() -> Mapping[str, Any]:
            message = await receive()
            content = bytearray(message["body"])
            content[-40] ^= 0x40
            return {**message, "body": bytes(content)}

        await app(scope, changed if state and scope.get("path") == protocol.UPDATE else receive, send)

    with serve(damaging) as url, sender([url], model) as scheme:
        before = digest(target)
        state["damage"] = True
        step(model)
        with pytest.raises(wsync.WorkerFailed, match=r"phase (update|finish) .*(malformed|corrupt)"):
            scheme.send()
        assert digest(target) == before
        state.clear()
        scheme.send()
        assert digest(target) == expected(model)


def test_a_transfer_of_ones_own_and_delta() -> None:
    """There it has no effect."""
    sizes = list[int]()

    class Own:
        def __init__(self, client: Any, source: Any) -> None:
            self.source = source

        def send_weights(self) -> None:
            sizes.append(sum(tensor.nbytes for _, tensor in self.source))

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"17")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"world_size": 1}'})

    with serve(answering) as url, trainer(url, Policy(), transfer=Own, send_transform=Delta()) as scheme:
        report = scheme.send()
        assert report is not None and report.bytes > 0
    assert len(sizes) == 2


# --- the engine's half ---

WEIGHTS = {"one": torch.arange(600.0), "two": torch.ones(500, dtype=torch.bfloat16)}
CHANGED = {"one": WEIGHTS["one"] + 1, "two": WEIGHTS["two"] * 2}
LAYOUT, OLD = packed(WEIGHTS)
NEW = packed(CHANGED)[1]
ALL = (0, LAYOUT.nbytes)


def difference(begin: int, end: int) -> bytes:
    made = Differences(Delta(), LAYOUT, NEW.flat).difference(Base(1, OLD.flat), begin, end)
    assert made is not None
    return made


def body(content: bytes, begin: int, end: int, **metadata: str) -> bytes:
    tags = {"session": "s", "weight_version": "2", "base": "1", "begin": str(begin), "end": str(end), **metadata}
    return b"".join(protocol.make_difference_body(content, tags))


def start(engine: EngineServer, version: int, **fields: str) -> tuple[int, Mapping[str, Any]]:
    return engine.post(protocol.START, {"session": "s", "weight_version": str(version), **fields})


def update(engine: EngineServer, content: bytes) -> tuple[int, Mapping[str, Any]]:
    return engine.ask("POST", protocol.UPDATE, content, content_type=protocol.SAFETENSORS)


def finish(engine: EngineServer, version: int, buffer: Buffer) -> int:
    fields = {"session": "s", "weight_version": str(version), "checksum": f"{checksum_of(buffer.flat, b''):016x}"}
    return engine.post(protocol.FINISH, fields)[0]


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    """An engine with version 1."""
    with EngineServer().serving() as engine:
        layout = SenderSettings(LAYOUT, checksum=True).dump().decode()
        settings = {"transfer": "body", "session": "s", "layout": layout, "chunk_bytes": 1 << 20, "delta": True}
        assert engine.post(protocol.INIT, {"init_info": settings})[0] == 200
        assert start(engine, 1)[0] == 200
        tags = {"session": "s", "weight_version": "1"}
        whole = dump_tensors(LAYOUT, OLD.views, range(len(LAYOUT.names)), tags)
        assert update(engine, b"".join(whole))[0] == 200
        assert finish(engine, 1, OLD) == 200
        yield engine


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (body(difference(*ALL), *ALL, base="7"), 409, "has not named"),
        (body(difference(*ALL), *ALL, session="other"), 409, "another trainer"),
        (body(difference(*ALL), *ALL, weight_version="3"), 409, "has not been started"),
        (body(difference(*ALL), -64, 64), 400, "a range of bytes"),
        (body(difference(*ALL), 0, 10**30), 400, "a range of bytes"),
        (body(difference(*ALL), 0, 1 << 40), 422, "no range of"),
        (body(difference(*ALL), 1, 64), 422, "no range of"),
        (body(difference(*ALL), 64, 64), 422, "no range of"),
        (body(difference(*ALL), 0, 64), 422, "a part of a tensor"),
        (body(difference(*ALL)[:-9], *ALL), 422, "malformed"),
        (body(b"", *ALL), 422, "at least 9 bytes"),
        (body(difference(*ALL)[:9] + b"junk", *ALL), 422, "malformed|is not one of"),
        (body(difference(*ALL), *ALL) + b"x", 400, "malformed"),
    ],
)
def test_malformed_differences_change_nothing(engine: EngineServer, content: bytes, status: int, said: str) -> None:
    assert start(engine, 2, base="1")[0] == 200
    answered, answer = update(engine, content)
    assert answered == status and re.search(said, answer["error"])
    assert update(engine, body(difference(*ALL), *ALL))[0] == 200
    status, answer = update(engine, body(difference(*ALL), *ALL))
    assert status == 422 and "have arrived already" in answer["error"]
    assert finish(engine, 2, NEW) == 200
    assert all(torch.equal(engine.weights[name], CHANGED[name]) for name in CHANGED)


def test_a_base_that_is_not_here_is_answered_with_a_reason(engine: EngineServer) -> None:
    status, answer = start(engine, 2, base="0")
    assert status == 409 and answer["reason"] == protocol.NO_BASE
    assert start(engine, 2, base="1")[0] == 200
    part = range_of(LAYOUT, [LAYOUT.names.index("one")])
    assert update(engine, body(difference(*part), *part))[0] == 200
    status, answer = start(engine, 3, base="1")  # a part is of version 2
    assert status == 409 and answer["reason"] == protocol.NO_BASE
    assert engine.calls == 1
