"""Does an engine compute what `transformers` computes? One prompt's log-probabilities, by both.

It finds what no digest sees: a kernel that is wrong, a prefix of older weights in a cache, a merge of adapters. vLLM
and SGLang have the route; the folder has the weights that were sent (`save_pretrained`).

    python examples/probe_engine.py http://127.0.0.1:8000 MODEL_FOLDER 0.01 [NAME]
"""

import json
import sys
import urllib.request

import torch
from transformers import AutoModelForCausalLM


def by_engine(url, name, prompt):
    """Return the log-probability of each token but the first."""
    body = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)["choices"][0]["logprobs"]["token_logprobs"]
    return torch.tensor(found[1 : len(prompt)])  # the first token has none


def by_transformers(model, prompt):
    """Return the same."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(prompt)[1:, None])[:, 0]


def probe(url, name, model, length=64):
    """Return by how much the log-probabilities of a random prompt differ, at most."""
    prompt = torch.randint(model.config.vocab_size, (length,)).tolist()
    return float((by_engine(url, name, prompt) - by_transformers(model, prompt)).abs().max())


if __name__ == "__main__":
    url, folder, tolerance, *name = sys.argv[1:]
    off = probe(url, name[0] if name else folder, AutoModelForCausalLM.from_pretrained(folder).eval())
    print(f"off by {off:.2g}")
    sys.exit(off > float(tolerance))
