"""Both halves of the protocol with engines, a trainer's and ``engine_app``, each beside an end that is not so."""

import asyncio
import base64
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
import torch
from asgi_server import serve
from http_engines import TOKEN, trainer
from torch import Tensor

import wsync
from wsync.engine import protocol
from wsync.engine.app import engine_app
from wsync.engine.client import EngineClient, VersionSource
from wsync.errors import SyncTimeout, WeightSyncError, WorkerDied, WorkerFailed
from wsync.gate import gate
from wsync.update import Update
from wsync.weights.layout import packed


class Loaded:
    def __init__(self, token: str | None = TOKEN) -> None:
        self.weights: dict[str, Tensor] = {}
        self.calls = 0
        self.app = engine_app(load=self._load, token=token)

    def _load(self, pairs: Any) -> None:
        self.calls += 1
        self.weights = {name: tensor.clone() for name, tensor in pairs}


def weights(value: float, size: int = 1000) -> dict[str, Tensor]:
    return {"one": torch.full((size,), float(value)), "two": torch.full((3, 5), value, dtype=torch.bfloat16)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_later_one_of_two_trainers_wins() -> None:
    loaded = Loaded()
    with serve(loaded.app) as url, trainer(url, weights(1)) as scheme:
        with trainer(url, weights(6)):
            assert same(loaded.weights, weights(6))
        with pytest.raises(WorkerFailed, match="another trainer"):
            scheme.send(weights(7))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wsync-eng")]


def test_a_disconnect_ends_every_wait() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def load(pairs: Any) -> None:
        if dict(pairs)["one"][0] == 2:
            entered.set()
            assert go_on.wait(10)

    with serve(engine_app(load=load, token=None)) as url:
        with trainer(url, weights(1), token=None) as scheme:
            thread = threading.Thread(target=lambda: (entered.wait(10), scheme.disconnect(0)))
            thread.start()
            with pytest.raises(WorkerDied, match=r"disconnect\(\)"):
                scheme.send(weights(2))
            go_on.set()
            thread.join()
            scheme.readmit(0)
        with wsync.HTTPWeightSyncScheme(["http://127.0.0.1:9", url], timeout=30.0) as scheme:
            scheme.init_on_sender("policy", weights=weights(1))
            threading.Timer(0.3, scheme.disconnect, [0]).start()
            with pytest.raises(WorkerDied, match=r"worker 0: .*disconnect\(\)") as died:
                scheme.connect()
            assert [*died.value.workers] == [0]


def answering(answer: Callable[[str], Any]) -> Callable[..., Awaitable[None]]:
    """Return a server that answers a route with what ``answer`` returns, or awaits."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        while (await receive()).get("more_body"):
            pass
        status, content = answer(scope["path"])
        if content is None:
            await asyncio.Event().wait()
            return
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return app


@pytest.mark.parametrize(
    ("route", "content", "kind"),
    [
        (protocol.WORLD_SIZE, b"[]", WorkerFailed),
        (protocol.INIT, None, SyncTimeout),
        (protocol.FINISH, b"null", WorkerFailed),
        (protocol.FINISH, b'{"weight_version": "1", "apply_seconds": "?"}', WorkerFailed),
        ("", b"", None),
    ],
)
def test_an_answer_that_does_not_fit_is_a_failure_of_that_engine(route: str, content: Any, kind: Any) -> None:
    asked = list[str]()

    def answer(path: str) -> tuple[int, bytes | None]:
        asked.append(path)
        usual = {"world_size": 1, "weight_version": "1", "apply_seconds": 0.5}
        return 200, content if path == route else json.dumps(usual).encode()

    with serve(answering(answer)) as url:
        timeout = 1.0 if content is None else 10.0
        expected = nullcontext() if kind is None else pytest.raises(kind, match=url)
        with expected, trainer(url, weights(1), timeout=timeout, pause="keep"):
            pass
        begun = protocol.START in asked and kind is not None  # then it stays paused, as weights may be incomplete
        assert asked.count(protocol.PAUSE) == asked.count(protocol.RESUME) + begun


def test_a_transfer_of_ones_own_has_the_methods_of_vllm() -> None:
    class Own:
        def __init__(self, client: EngineClient, source: Any) -> None:
            self.client, self.source = client, source
            client.init_weight_transfer_engine({"world_size": 1 + client.get_world_size()})

        def send_weights(self) -> None:
            self.client.start_weight_update()
            self.client.update_weights({"names": [name for name, _ in self.source]})
            if self.client.version == 2:
                raise ArithmeticError("the transfer fails")
            self.client.finish_weight_update()

    asked = list[str]()
    app = answering(lambda path: (asked.append(path), (200, b'{"world_size": 2}'))[1])
    with serve(app) as url, trainer(url, weights(1), transfer=Own, pause="keep") as scheme:
        assert asked[1:] == [protocol.WORLD_SIZE, protocol.INIT, protocol.PAUSE, protocol.START, protocol.UPDATE,
                             protocol.FINISH, protocol.RESUME]  # fmt: skip
        with pytest.raises(WorkerFailed, match=r"the transfer fails(?s:.*)stays paused"):
            scheme.send(weights(2))
        assert asked[-1] == protocol.UPDATE
        scheme.send(weights(3))
        assert asked[-1] == protocol.RESUME
        with pytest.raises(WorkerFailed, match=r"applied nowhere(?s:.*)its transfer cannot prepare a version"):
            wsync.synchronize({scheme: None})


def test_an_update_of_a_dead_trainer_is_finished_before_another_is_begun() -> None:
    asked, active = list[str](), True

    def answer(path: str) -> tuple[int, bytes]:
        nonlocal active
        asked.append(path)
        if path == protocol.START and active:
            return 500, b'{"error": {"message": "called while a weight update is already active."}}'
        active = active and path != protocol.FINISH
        return 200, b'{"world_size": 1, "weight_version": "1"}'

    with serve(answering(answer)) as url, trainer(url, weights(1)):
        assert asked[2:] == [protocol.START, protocol.FINISH, protocol.START, protocol.UPDATE, protocol.FINISH]


def test_an_engine_that_refuses_the_layout_is_not_waited_for() -> None:
    def answer(path: str) -> tuple[int, bytes]:
        return (500 if path == protocol.INIT else 200), b'{"world_size": 2, "error": {"message": "no such weight"}}'

    with serve(answering(answer)) as url:
        expected = pytest.raises(WorkerFailed, match=f"{url}: phase init .*answered 500: no such weight")
        with expected, trainer(url, weights(1), transfer="wsync", timeout=200.0):
            pass


@pytest.mark.parametrize("silent", [protocol.PAUSE, protocol.UPDATE])
def test_an_engine_that_is_dead_is_named_while_a_request_waits(silent: str) -> None:
    """Its server answers, its core does not: as vLLM's ``/health`` says with 503."""
    dead = False

    def answer(path: str) -> tuple[int, bytes | None]:
        if dead and path == protocol.HEALTH:
            return 503, b""
        return 200, None if dead and path == silent else b'{"world_size": 1, "weight_version": "1"}'

    with serve(answering(answer)) as url, trainer(url, weights(1), pause="keep", timeout=60.0) as scheme:
        dead = True
        phase = silent.split("_")[0][1:]
        with pytest.raises(WorkerDied, match=rf"{url}: phase {phase}: the engine has died(?s:.*)503"):
            scheme.send(weights(2))
        assert scheme.ledger()[0]["state"] == "dead"


def test_the_source_is_one_of_vllm_before_and_after_its_change() -> None:
    layout, buffer = packed(weights(4))
    source = VersionSource(layout)
    assert source.metadata() == source.metadata and [meta.name for meta in source.metadata] == source.owned_names(0)
    source.update = Update(1, buffer)
    assert source.implements_iter_full() and same(dict(source.iter_full()), dict(source))


def test_vllm_is_never_updated_without_a_pause_nor_sent_what_a_checkpoint_lacks() -> None:
    assert wsync.HTTPWeightSyncScheme("http://a", transfer="wsync").pause == "keep"
    assert wsync.HTTPWeightSyncScheme("http://a").pause is None
    model, loaded = torch.nn.Linear(2, 2), Loaded(token=None)
    model.register_buffer("inv_freq", torch.ones(2), persistent=False)
    model.register_buffer("kept", torch.ones(2))
    with serve(loaded.app) as url, trainer(url, model, token=None) as scheme:
        scheme.send()
        assert loaded.weights.keys() == {"weight", "bias", "kept"} and loaded.app.version == "2"


# --- the engine's half alone ---


def init(session: str = "s", **fields: Any) -> dict[str, Any]:
    layout = base64.b64encode(packed(weights(1))[0].encode()).decode()
    return {"init_info": {"transfer": "body", "session": session, "layout": layout, **fields}}


FLAT = packed(weights(1))[1].memory
TAGS = {"session": "s", "weight_version": "1", "checksum": "0" * 16}


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Loaded, httpx.Client]]:
    loaded = Loaded(token=None)
    with serve(loaded.app) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield loaded, client


def begin(client: httpx.Client) -> None:
    assert client.post(protocol.INIT, json=init()).status_code == 200
    assert client.post(protocol.START, json=TAGS).status_code == 200


@pytest.mark.parametrize(
    ("route", "sent", "status", "said"),
    [
        (protocol.INIT, {"content": b"{"}, 400, "not JSON"),
        (protocol.INIT, {"content": b"[" * 100_000}, 400, "not JSON"),
        (protocol.INIT, {"json": {}}, 400, "transfer"),
        (protocol.INIT, {"json": init(layout="AAAA")}, 400, "layout"),
        (protocol.START, {"json": {"session": 3}}, 400, "'session'"),
        (protocol.START, {"content": json.dumps({**TAGS, "session": "\ud800"})}, 400, "not JSON"),
        (protocol.UPDATE, {"content": b"{}"}, 400, "'session'"),
        (protocol.UPDATE, {"content": bytes(len(FLAT) + 1), "params": TAGS}, 413, "may have"),
        (protocol.UPDATE, {"params": {**TAGS, "session": "other"}}, 409, "another trainer"),
        (protocol.UPDATE, {"content": bytes(FLAT), "params": TAGS}, 409, "incomplete"),
        (protocol.FINISH, {"json": TAGS}, 409, "no version has arrived"),
    ],
)
def test_requests_that_are_refused(engine: Any, route: str, sent: dict[str, Any], status: int, said: str) -> None:
    loaded, client = engine
    begin(client)
    answer = client.post(route, **sent)
    assert answer.status_code == status and said in answer.json()["error"]
    assert client.post(protocol.FINISH, json=TAGS).status_code == 409 and not loaded.calls


def test_an_engine_that_cannot_pause_says_so() -> None:
    with (
        serve(engine_app(load=list, token=None)) as url,
        pytest.raises(WorkerFailed, match=r"phase pause .* 404"),
        trainer(url, weights(1), pause="keep", token=None),
    ):
        pass


def test_an_engine_whose_load_has_failed_half_way_is_not_used_until_a_version_is_loaded() -> None:
    fails = False

    def load(pairs: Any) -> None:
        for _ in pairs:
            if fails:
                raise ArithmeticError("no memory")

    with serve(engine_app(load=load, token=None)) as url, trainer(url, weights(1), token=None) as scheme:
        fails = True
        for value in (2, 3):
            with pytest.raises(WorkerFailed, match="no memory"):
                scheme.send(weights(value))
            with pytest.raises(WeightSyncError, match="this engine may have weights of two versions"), gate():
                pass
        fails = False
        scheme.send(weights(4))
        with gate():
            pass
