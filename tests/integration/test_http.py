"""Weights over HTTP: engines in processes of their own, driven through the phases of vLLM's weight transfer."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wsync
from wsync.engine.client import EngineClient
from wsync.engine.transfers import VersionSource
from wsync.testing import WorkerPool
from wsync.testing.asgi import serve
from wsync.testing.commands import WorkerState
from wsync.testing.models import EveryTensorKind, Small, WithExtraState, fill, longer, scramble
from wsync.transforms import Cast, Dequantize, QuantizeInt8

TOKEN = "a token"
Options = dict[str, Any]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


# --- commands of an engine's process ---


def start_engine(state: WorkerState, port: int = 0, token: str | None = TOKEN) -> str:
    """Serve an engine whose function keeps copies of what it is given; return its URL."""
    loaded = state.kept["loaded"] = dict[str, Tensor]()

    def load(pairs: Any) -> None:
        if state.kept.pop("refuse", False):
            raise ArithmeticError("the engine refuses")
        loaded.update({name: tensor.clone() for name, tensor in pairs})

    state.kept["app"] = app = wsync.engine_app(load=load, token=token)
    state.kept["server"] = stack = ExitStack()
    return stack.enter_context(serve(app, port=port))


def stop_engine(state: WorkerState) -> None:
    state.kept["server"].close()


def refuse_next(state: WorkerState) -> None:
    state.kept["refuse"] = True


def value(state: WorkerState) -> tuple[str, list[float]]:
    """Return the version, and the weights of a ``Small``."""
    with wsync.gate():
        return state.kept["app"].version, state.kept["loaded"]["weight"].tolist()


@contextmanager
def trainer(urls: Any, model: nn.Module | None = None, **options: Any) -> Iterator[wsync.HTTPWeightSyncScheme]:
    with wsync.HTTPWeightSyncScheme(urls, **{"timeout": 30.0, "token": TOKEN, **options}) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1) if model is None else model)
        scheme.connect()
        yield scheme


@contextmanager
def engines(pool: WorkerPool, count: int) -> Iterator[tuple[Any, list[str]]]:
    with pool.group(count) as workers:
        yield workers, workers.call(start_engine)
        for worker in workers:
            if worker.reusable:
                worker.call(stop_engine)


# --- versions ---


@pytest.mark.parametrize("pause", [None, "abort", "wait", "keep"])
def test_every_version_arrives(pool: WorkerPool, pause: Any) -> None:
    with engines(pool, 2) as (workers, urls), trainer(urls, pause=pause) as scheme:
        assert workers.call(value) == [("1", [1.0] * 4)] * 2
        for number in range(2, 5):
            report = scheme.send(fill(Small(), number))
            assert report is not None and report.version == number and report.phases["apply"] > 0
            assert workers.call(value) == [(str(number), [float(number)] * 4)] * 2
        scheme.send(fill(Small(), 9), worker_ids=[1])
        assert workers.call(value) == [("4", [4.0] * 4), ("5", [9.0] * 4)]
        scheme.send_async(fill(Small(), 10))
        scheme.send_async(fill(Small(), 11))
        scheme.wait_async()
        assert workers.call(value) == [("7", [11.0] * 4)] * 2


def test_every_kind_of_tensor_in_bounded_bodies() -> None:
    given = scramble(EveryTensorKind(), 1).state_dict()
    weights = {name: tensor for name, tensor in given.items() if isinstance(tensor, torch.Tensor)}
    loaded, sizes = dict[str, Tensor](), list[int]()
    app = wsync.engine_app(load=lambda pairs: loaded.update({name: one.clone() for name, one in pairs}), token=None)
    limit = max(tensor.nbytes for tensor in weights.values())
    with serve(count_bodies(app, sizes)) as url:
        transport = wsync.HTTPWeightSyncScheme(url, chunk_bytes=limit).create_transport()
        transport.setup_connection_and_weights_on_sender()
        transport.send_weights(weights)
        transport.close()
    assert loaded.keys() == weights.keys() and len(sizes) > 2
    assert max(sizes) < limit + 16_384  # with the header
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0, equal_nan=True)


def count_bodies(app: Any, sizes: list[int]) -> Callable[..., Awaitable[None]]:
    """Return the application, and note the sizes of bodies with weights."""

    async def counted(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope.get("path") == "/update_weights":
            sizes.append(int(dict(scope["headers"])[b"content-length"]))
        await app(scope, receive, send)

    return counted


def test_models_and_transforms_at_both_ends() -> None:
    """A module is gated and updated in place; int8 travels, at a quarter of the bytes."""
    model, target = nn.Linear(256, 64), nn.Linear(256, 64, dtype=torch.bfloat16)
    app = wsync.engine_app(target, token=None, receive_transform=[Dequantize(), Cast("bfloat16")])
    with serve(app) as url, trainer(url, model, send_transform=QuantizeInt8()) as scheme:
        report = scheme.send()
        assert report is not None and report.bytes < 0.3 * model.weight.nbytes
        step = model.weight.detach().abs().amax(1, keepdim=True) / 127
        assert ((target.weight.float() - model.weight).abs() <= 0.51 * step + 0.004 * model.weight.abs()).all()


class Extremes(Small):
    def forward(self) -> Tensor:
        return torch.stack([self.weight.min(), self.weight.max()])


def test_no_forward_is_torn() -> None:
    target, stop, odd = fill(Extremes(100_000), 0), threading.Event(), list[Any]()

    def act() -> None:
        while not stop.is_set():
            lowest, highest = target().tolist()
            if lowest != highest:
                odd.append((lowest, highest))

    thread = threading.Thread(target=act)
    with serve(wsync.engine_app(target, token=None)) as url, trainer(url, fill(Small(100_000), 1)) as scheme:
        thread.start()
        try:
            for number in range(30):
                scheme.send(fill(Small(100_000), number))
        finally:
            stop.set()
            thread.join()
    assert not odd and target()[0] == 29


# --- faults ---


def test_a_killed_engine_is_an_error_at_once_and_another_takes_its_place(pool: WorkerPool) -> None:
    with engines(pool, 2) as (workers, urls), trainer(urls) as scheme:
        workers[1].kill()
        started = time.monotonic()
        with pytest.raises(wsync.WorkerDied, match=rf"worker 1: {urls[1]}: phase start .*refused") as caught:
            scheme.send(fill(Small(), 2))
        assert time.monotonic() - started < 10
        assert list(caught.value.workers) == [1]
        assert workers[0].call(value) == ("2", [2.0] * 4)
        scheme.send(fill(Small(), 3))  # to those that are left
        workers.replace(1, workers.spare())
        workers[1].call(start_engine, int(urls[1].rsplit(":", 1)[1]))
        scheme.readmit(1)
        assert workers.call(value) == [("3", [3.0] * 4)] * 2
        scheme.send(fill(Small(), 4))
        assert workers.call(value) == [("4", [4.0] * 4)] * 2


def test_an_engine_that_was_started_again_is_initialised_again(pool: WorkerPool) -> None:
    with engines(pool, 1) as (workers, urls), trainer(urls) as scheme:
        workers[0].call(stop_engine)
        workers[0].call(start_engine, int(urls[0].rsplit(":", 1)[1]))
        scheme.send(fill(Small(), 2))
        assert workers[0].call(value) == ("2", [2.0] * 4)


def test_a_silent_engine_is_an_error_at_the_deadline(pool: WorkerPool) -> None:
    with engines(pool, 2) as (workers, urls), trainer(urls) as scheme:
        workers[1].stop()
        scheme.timeout = 1.0
        with pytest.raises(wsync.SyncTimeout, match=rf"worker 1: {urls[1]}: phase start.*no answer before"):
            scheme.send(fill(Small(), 2))
        assert workers[0].call(value) == ("2", [2.0] * 4)
        workers[1].resume()
        scheme.timeout = 30.0
        scheme.send(fill(Small(), 3))
        assert workers.call(value) == [("3", [3.0] * 4)] * 2


def test_what_the_engine_raises_reaches_the_trainer(pool: WorkerPool) -> None:
    with engines(pool, 2) as (workers, urls), trainer(urls) as scheme:
        workers[0].call(refuse_next)
        with pytest.raises(wsync.WorkerFailed, match=r"phase finish (?s:.)*Traceback(?s:.)*the engine refuses"):
            scheme.send(fill(Small(), 2))
        assert workers.call(value) == [("1", [1.0] * 4), ("2", [2.0] * 4)]
        scheme.send(fill(Small(), 3))
        assert workers.call(value) == [("3", [3.0] * 4)] * 2


def disturbed(app: Any, state: dict[str, Any]) -> Callable[..., Awaitable[None]]:
    """Return the application; in bodies with weights a bit is flipped, or they break off, as ``state`` has it."""

    async def disturbing(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        async def changed() -> Mapping[str, Any]:
            message = await receive()
            content = bytearray(message["body"])
            content[-1] ^= 0x40
            return {**message, "body": bytes(content)}

        hit = state and scope.get("path") == "/update_weights"
        if hit and state.get("broken"):
            raise ConnectionResetError
        await app(scope, changed if hit else receive, send)

    return disturbing


def test_a_disturbed_transfer_changes_nothing() -> None:
    target, state = Small(), dict[str, Any]()
    with serve(disturbed(wsync.engine_app(target, token=None), state)) as url, trainer(url) as scheme:
        state["flipped"] = True
        with pytest.raises(wsync.WorkerFailed, match=r"phase finish .*409: the version is corrupt"):
            scheme.send(fill(Small(), 2))
        assert target()[0] == 1
        state["broken"] = True
        with pytest.raises(wsync.WorkerDied, match="phase update"):
            scheme.send(fill(Small(), 3))
        assert target()[0] == 1
        state.clear()
        scheme.readmit(0)  # it gets what was sent last
        assert target()[0] == 3


def test_a_forked_child_leaves_the_engines_alone() -> None:
    target = Small()
    with serve(wsync.engine_app(target, token=None)) as url, trainer(url) as scheme:
        child = multiprocessing.get_context("fork").Process(target=scheme.shutdown)
        child.start()
        child.join(30)
        assert child.exitcode == 0
        scheme.send(fill(Small(), 2))
        assert target()[0] == 2


def test_nothing_is_left_after_shutdown() -> None:
    with serve(wsync.engine_app(Small(), token=None)) as url, trainer(url):
        pass
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("wsync-engine")]


def test_weights_that_do_not_fit_are_an_error_at_connect() -> None:
    with serve(wsync.engine_app(Small(), token=None)) as url:
        with (
            pytest.raises(wsync.WorkerFailed, match=r"phase init .*422: LayoutMismatch.*weight"),
            trainer(url, longer()),
        ):
            pass
        with pytest.raises(wsync.WorkerFailed, match="extra state cannot be sent"), trainer(url, WithExtraState()):
            pass
        with wsync.HTTPWeightSyncScheme(url) as scheme:
            scheme.init_on_sender("policy")
            scheme.connect()
            with pytest.raises(wsync.WorkerFailed, match=r"applied nowhere(?s:.)*LayoutMismatch"):
                scheme.send(longer())


@pytest.mark.parametrize("token", [None, "another"])
def test_a_wrong_token_is_an_error_at_once(token: str | None) -> None:
    app = wsync.engine_app(Small(), token=TOKEN)
    with serve(app) as url, pytest.raises(wsync.WorkerFailed, match=r"401.*token"), trainer(url, token=token):
        pass


def test_an_engine_that_never_comes() -> None:
    said = r"worker 0: http://127\.0\.0\.1:9: phase connect .*refused"
    with pytest.raises(wsync.SyncTimeout, match=said), trainer("http://127.0.0.1:9", timeout=0.3):
        pass


def test_two_trainers_of_one_engine() -> None:
    with serve(wsync.engine_app(Small(), token=None)) as url, trainer(url) as first, trainer(url) as second:
        with pytest.raises(wsync.WorkerFailed, match="another trainer"):
            first.send()
        second.send()


def test_a_redirect_is_not_followed() -> None:
    async def elsewhere(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"location", b"http://127.0.0.1:9/"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 307, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    with serve(elsewhere) as url, pytest.raises(wsync.WorkerFailed, match="answered 307"), trainer(url):
        pass


def test_models_cannot_be_switched_together() -> None:
    with (
        serve(wsync.engine_app(Small(), token=None)) as url,
        trainer(url) as scheme,
        pytest.raises(wsync.WeightSyncError, match="one by one"),
    ):
        wsync.synchronize({scheme: fill(Small(), 2)})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"urls": []}, "at least one"),
        ({"urls": ["http://a", "http://a/"]}, "each engine once"),
        ({"urls": "ftp://a"}, "like 'http://host:8000'"),
        ({"urls": "http://user:word@a"}, "like 'http://host:8000'"),
        ({"urls": "http://a", "pause": "stop"}, "pause is 'abort'"),
        ({"urls": "http://a", "chunk_bytes": 0}, "chunk_bytes"),
        ({"urls": "http://a", "token": "x\r\ny"}, "printable"),
    ],
)
def test_wrong_options(options: Options, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wsync.HTTPWeightSyncScheme(**options)


def test_the_receiving_end_is_the_application() -> None:
    with pytest.raises(RuntimeError, match="engine_app"):
        wsync.HTTPWeightSyncScheme("http://a").init_on_receiver("policy", model=Small(), worker_idx=0)


# --- a transfer beside HTTP, as vLLM's own trainer engines are ---


def test_a_transfer_of_ones_own_drives_the_documented_routes() -> None:
    """A server with vLLM's routes and fields; the weights do not go through it."""
    asked, passed = list[tuple[str, Any]](), list[dict[str, Tensor]]()

    class Trainer:  # as vLLM's TrainerWeightTransferEngine, with its VLLMWeightSyncClient and WeightSource
        def __init__(self, client: EngineClient, source: VersionSource) -> None:
            self.client, self.source = client, source
            client.init_weight_transfer_engine({"world_size": 1 + client.get_world_size()})

        def send_weights(self) -> None:
            self.client.start_weight_update()
            meta = self.source.metadata()
            passed.append({name: tensor.clone() for name, tensor in self.source})
            self.client.update_weights({"names": [one.name for one in meta], "shapes": [one.shape for one in meta]})
            self.client.finish_weight_update()

    with serve(like_vllm(asked)) as url, trainer(url, transfer=Trainer, pause="keep") as scheme:
        scheme.send(fill(Small(), 2))
    update = [
        ("POST /pause?mode=keep", None),
        ("POST /start_weight_update", None),
        ("POST /update_weights", {"update_info": {"names": ["weight"], "shapes": [[4]]}}),
        ("POST /finish_weight_update", {"weight_version": "2"}),
        ("POST /resume", None),
    ]
    assert asked[-5:] == update
    assert ("POST /init_weight_transfer_engine", {"init_info": {"world_size": 3}}) in asked
    assert [one["weight"].tolist() for one in passed] == [[1.0] * 4, [2.0] * 4]


def like_vllm(asked: list[tuple[str, Any]]) -> Callable[..., Awaitable[None]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        asked.append((f"{scope['method']} {scope['path']}{query}", json.loads(body) if body else None))
        content = b'{"world_size": 2}' if scope["path"] == "/get_world_size" else b'{"message": "done"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return app
