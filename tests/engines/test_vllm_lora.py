"""Adapters into an unmodified vLLM, while it generates: each request is of the version that it names."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from stock_vllm import Server, log_probabilities, make, serving

import wsync

pytest.importorskip("vllm", reason="there is no vLLM here: `make engines` makes an environment that has it")
pytestmark = pytest.mark.timeout(600)
PROMPT, RANK, ALPHA = [5, 9, 11, 40, 77, 200, 31], 4, 8
MATRICES = [f"model.layers.{layer}.self_attn.{part}" for layer in (0, 1) for part in ("q_proj", "v_proj")]


def model_with(version: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the weights of a model with an adapter, by the names of PEFT's modules; and the same model merged."""
    model, chance = make(0), torch.Generator().manual_seed(version)
    weights = {f"base_model.model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name in MATRICES:
        matrix = model.get_submodule(name).weight
        down, up = (torch.randn(shape, generator=chance) * 0.3 for shape in ((RANK, 128), (len(matrix), RANK)))
        for part, tensor in (("A", down), ("B", up)):
            weights[f"base_model.model.{name}.lora_{part}.default.weight"] = tensor
        with torch.no_grad():
            matrix += up @ down * ALPHA / RANK
    return weights, model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        options = f"--enable-lora --max-loras 5 --max-lora-rank {RANK * 2}"
        with serving(tmp_path_factory.mktemp("model"), options) as server:
            yield server


def test_a_busy_engine_has_the_newest_adapters(server: Server, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    versions, answers, stop, said = {1: model_with(1)}, list[Any](), threading.Event(), SimpleQueue[int]()
    options = {
        "transfer": "lora",
        "folder": tmp_path / "run",
        "model_folder": tmp_path,
        "max_staleness": 3,
        "timeout": 300.0,
    }

    def generate() -> None:
        while not stop.is_set():
            version = newest
            name = scheme.adapter_name(version)
            answers.append((version, server.complete(PROMPT, 20, temperature=1.0, model=name)))
            said.put(version)

    with wsync.HTTPWeightSyncScheme(server.url, **options) as scheme:
        scheme.init_on_sender("policy", weights=versions[1][0])
        scheme.connect()
        newest, loaded, client = 1, [], threading.Thread(target=generate)
        client.start()
        try:
            for version in range(2, 9):
                versions[version] = model_with(version)
                report = scheme.send(versions[version][0])
                assert report is not None and report.bytes < 30_000
                newest = version
                while said.get(timeout=120) != version:  # it asks for this one, and not for one that is unloaded
                    pass
                loaded = [one["id"] for one in server.post("/v1/models")["data"]]
                assert loaded == ["tiny", *map(scheme.adapter_name, range(max(1, version - 3), version + 1))]
                assert len([*(tmp_path / "run" / "policy").iterdir()]) == version  # for requests that run
        finally:
            stop.set()
            client.join()
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "r": 64}))
        with pytest.raises(wsync.WorkerFailed, match=rf"{server.url}: phase prepare .*answered 500.*rank 64"):
            scheme.send(versions[2][0])
        assert [one["id"] for one in server.post("/v1/models")["data"]] == loaded
    for version, (tokens, found, _) in answers:
        off = (log_probabilities(versions[version][1], PROMPT, tokens) - torch.tensor(found)).abs().max()
        assert off < 2e-3, f"tokens of version {version} are off by {off}"
    assert {version for version, _ in answers} >= {*range(2, 9)}
