"""Does an engine compute what `transformers` computes? One prompt's log-probabilities, by both.

It finds what no digest sees: a kernel that is wrong, a merge of adapters; also a prefix of older weights in a cache, if
it was run before they were replaced. vLLM and SGLang have the route; vLLM needs its tokenizer for it, and
`--max-model-len 258` or more. The folder has the weights that were sent (`save_pretrained`). Exit status: 1 if they
differ by more than the tolerance, 2 if the engine cannot be asked.

    python examples/probe_engine.py http://127.0.0.1:8000 MODEL_FOLDER 0.01 [NAME]
"""

import json
import sys
import urllib.error
import urllib.request

import torch
from transformers import AutoModelForCausalLM


def by_engine(url, name, prompt):
    """Return the log-probability of the likeliest token that follows, then of each one of the prompt but the first."""
    found = []
    for echo in (False, True):  # with the prompt's own tokens, vLLM reads no cache
        body = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": echo}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found += json.load(answer)["choices"][0]["logprobs"]["token_logprobs"][echo : len(prompt)]
    return torch.tensor(found)


def by_transformers(model, prompt):
    """Return the same."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return torch.cat([logits[-1:].amax(1), logits[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]])


def probe(url, name, model, length=257):  # all but the last token are whole blocks of a cache
    """Return by how much the log-probabilities of a prompt differ, at most. It is the same one at each call."""
    prompt = [7 * i % model.config.vocab_size for i in range(length)]
    return float((by_engine(url, name, prompt) - by_transformers(model, prompt)).abs().max())


if __name__ == "__main__":
    url, folder, tolerance, *name = sys.argv[1:]
    try:
        off = probe(url, name[0] if name else folder, AutoModelForCausalLM.from_pretrained(folder).eval())
    except urllib.error.HTTPError as error:
        print(f"{url} cannot be asked: {error.read().decode()}", file=sys.stderr)
        sys.exit(2)
    print(f"off by {off:.2g}")
    sys.exit(off > float(tolerance))
