"""A stock vLLM server as its users see it, and what ``transformers`` says about the same weights."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import wsync

VOCABULARY = 256
HERE = Path(__file__).parent


def make(seed: int, *, tied: bool = True) -> Any:
    """Return a model with random weights, biases included. A head has 32 dimensions: vLLM dies of 16 on a CPU."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        tie_word_embeddings=tied, initializer_range=0.08,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def save(folder: Path, *, tied: bool) -> None:
    """Make a folder that vLLM serves."""
    make(0, tied=tied).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2").save_pretrained(
        folder
    )


class Server(NamedTuple):
    """A server that may be starting still."""

    url: str
    pid: int

    def post(self, route: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        method = "GET" if route in ("/is_paused", "/get_world_size", "/weight_info", "/v1/models") else "POST"
        request = urllib.request.Request(self.url + route, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or b"{}")

    def paused(self) -> bool:
        return self.post("/is_paused")["is_paused"]

    def complete(
        self, prompt: Sequence[int], tokens: int, model: str = "tiny", **options: Any
    ) -> tuple[list[int], list[float], list[str]]:
        """Return the tokens that follow, their log-probabilities, and the names of the versions that vLLM gives."""
        sampling = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, **options}
        body = {"model": model, "token_ids": prompt, "sampling_params": sampling}
        found = self.post("/inference/v1/generate", body)["choices"][0]
        spans = found["weight_versions"] or []
        names = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        return found["token_ids"], [one["logprob"] for one in found["logprobs"]["content"]], names

    def reload(self, model: Any, folder: Path, pause: str) -> None:
        """Do what one does without wsync: vLLM's own reload of a checkpoint that is written whole."""
        model.save_pretrained(folder)
        self.post(f"/pause?mode={pause}")
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self.post("/resume")

    def serves(self, model: Any, prompt: Sequence[int]) -> bool:
        """Whether greedy outputs are those of ``transformers``."""
        return self.complete(prompt, 12, temperature=0)[0] == greedy(model, prompt)

    def core(self) -> int:
        """The process that runs the model."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.pid and "EngineCore" in (folder / "cmdline").read_text():
                    return int(folder.name)
            except OSError:  # it has ended
                continue
        raise LookupError("there is no engine core")

    def kill_core(self) -> None:
        os.kill(self.core(), 9)


def greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    tokens = [*prompt]
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def log_probabilities(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@contextmanager
def trainer(server: Server, model: Any, **options: Any) -> Iterator[wsync.HTTPWeightSyncScheme]:
    """A trainer that has sent the weights of ``model``: a module, or a state dict."""
    with wsync.HTTPWeightSyncScheme(server.url, **{"transfer": "wsync", "timeout": 300.0, **options}) as scheme:
        given = {"weights": model} if isinstance(model, dict) else {"model": model}
        scheme.init_on_sender("policy", **given)
        scheme.connect()
        yield scheme


@contextmanager
def serving(folder: Path, options: str, port: int = 0, *, tied: bool = True) -> Iterator[Server]:
    save(folder, tied=tied)
    with socket.create_server(("127.0.0.1", port)) as free:
        port = free.getsockname()[1]
    command = f"""{sys.executable} -m vllm.entrypoints.openai.api_server --model {folder} --served-model-name tiny
        --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 8
        --enable-scale-out --worker-extension-cls faults.Faults {options}""".split()
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    environment = {**os.environ, **variables, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--weight-transfer-config", '{"backend": "wsync"}'],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process.pid)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        print(log.read_text()[-4000:])  # shown where a test has failed
