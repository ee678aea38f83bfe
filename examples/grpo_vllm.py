"""GRPO: a model of `transformers` is trained, an unmodified vLLM server acts, and wsync carries the weights.

The model is tiny and begins from random weights. It is rewarded for counting: by the share of tokens that are one more
than the token before. While it learns from one batch, vLLM generates the next, so a sample may have tokens of two
versions. vLLM says which version each token is of, and the log counts them.

Two minutes on two cores; in an environment with vLLM, transformers and wsync (`make engines` makes .venv-engines):

    .venv-engines/bin/python examples/grpo_vllm.py
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import wsync

STEPS, PROMPTS, GROUP, TOKENS, WORDS = 60, 8, 8, 12, 24
CLIP, LEARNING_RATE = 0.2, 2e-3


def make_model():
    """Return a model with random weights."""
    config = Qwen2Config(
        vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


@contextmanager
def vllm_server(model):
    """Start an unmodified vLLM; yield its URL at once: `connect` waits until it serves."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        model.save_pretrained(folder)
        port = free.getsockname()[1]
        free.close()
        command = f"""{sys.executable} -m vllm.entrypoints.openai.api_server --model {folder} --skip-tokenizer-init
            --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 64 --enable-scale-out"""
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        command = [*command.split(), "--weight-transfer-config", '{"backend": "wsync"}']
        with open("vllm.log", "w") as log:
            server = subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log)
        print("vLLM is starting, which takes a minute or so; what it says is in vllm.log", flush=True)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def generate(url, prompt):
    """Return tokens, log-probabilities, and versions (`[{"version": "2", "start": 0, "end": 8}]`) of some samples."""
    sampling = {"n": GROUP, "max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0}
    body = json.dumps({"token_ids": prompt, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/inference/v1/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        samples = json.load(answer)["choices"]
    tokens = torch.tensor([sample["token_ids"] for sample in samples])
    log_probs = torch.tensor([[token["logprob"] for token in sample["logprobs"]["content"]] for sample in samples])
    return tokens, log_probs, [sample["weight_versions"] for sample in samples]


def loss_of(model, prompt, tokens, behaviour, rewards):
    """GRPO: a group's rewards are standardised; probability ratios to the policy that acted are clipped, by token."""
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    inputs = torch.cat([torch.tensor([prompt] * len(tokens)), tokens], dim=1)
    logits = model(inputs).logits[:, len(prompt) - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    ratio = (log_probs - behaviour).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def main():
    """Train; one line for each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    with (
        vllm_server(model) as url,
        ThreadPoolExecutor(PROMPTS) as pool,
        wsync.HTTPWeightSyncScheme(url, transfer="wsync", timeout=300.0) as scheme,
    ):
        scheme.init_on_sender("policy", model=model)
        scheme.connect()  # waits for the server; delivers version 1

        def ask():
            prompts = torch.randint(WORDS, (PROMPTS, 2)).tolist()
            return [(prompt, pool.submit(generate, url, prompt)) for prompt in prompts]

        asked = ask()
        for step in range(1, STEPS + 1):
            batch, asked = [(prompt, *sample.result()) for prompt, sample in asked], ask()
            optimizer.zero_grad()
            rewards = []
            for prompt, tokens, behaviour, _ in batch:
                before = torch.cat([torch.full((GROUP, 1), prompt[-1]), tokens[:, :-1]], dim=1)
                rewards.append((tokens == (before + 1) % WORDS).float().mean(dim=1))
                (loss_of(model, prompt, tokens, behaviour, rewards[-1]) / PROMPTS).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            report = scheme.send()
            samples = [tuple(span["version"] for span in spans) for *_, group in batch for spans in group]
            versions = ", ".join(f"{n} of {' and '.join(kind)}" for kind, n in sorted(Counter(samples).items()))
            reward, milliseconds = torch.cat(rewards).mean(), 1e3 * report.seconds
            print(
                f"step {step:2}: reward {reward:.2f}, samples by version: {versions}; "
                f"version {report.version} sent in {milliseconds:.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    if find_spec("vllm") is None:
        sys.exit("vLLM is not installed here: make engines")
    main()
