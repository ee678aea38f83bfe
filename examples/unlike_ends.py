"""A trainer and an inference engine that differ in library, names, shapes and precision, in two processes.

    python examples/unlike_ends.py [shared_mem] [store] [http] [ray] [shared_mem-int8] [store-int8] …

Trainer: a GPT-2 of ``transformers`` from a config: float32, tied embeddings, weights ``[in, out]`` (without that
package: the engine's class in float32). Engine: PyTorch's layers, bfloat16, weights ``[out, in]``, other names; it
generates all the time. Each version's logits are compared with those of a reference in the trainer's process. With
``-int8`` a quarter of the bytes travel; each weight is then off by at most half a step. http: ``.[engine]``.
"""

import multiprocessing
import socket
import sys
import tempfile
import threading
from functools import reduce
from importlib.util import find_spec
from multiprocessing.connection import Client, Listener

import torch
from torch import nn

import wsync
from wsync.transforms import Cast, Chain, Dequantize, Exclude, QuantizeInt8

if find_spec("transformers"):
    from transformers import GPT2Config, GPT2LMHeadModel
else:
    GPT2Config = None

torch.set_num_threads(1)
WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, TOKEN = 128, 4, 3, 512, 64, "a token of both ends"
SIZES = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": VOCABULARY, "n_positions": LENGTH}
NAMES = {"transformer.h.": "h.layers.", "transformer.ln_f": "h.norm", "transformer.": "", "ln_": "norm"}
NAMES |= {"attn.c_attn.": "self_attn.in_proj_", "attn.c_proj": "self_attn.out_proj"}
NAMES |= {"mlp.c_fc": "linear1", "mlp.c_proj": "linear2"}


class Engine(nn.Module):
    """GPT-2 of other parts: layers with one fused projection for q, k and v."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, nn.GELU("tanh"), 1e-5, True, norm_first=True)
        self.h = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.h(x, mask, is_causal=True) @ self.wte.weight.t()

    def load_weights(self, pairs):  # as models of vLLM have it
        for name, tensor in pairs:
            self.get_parameter(name).data.copy_(tensor)


def from_gpt2(weights):
    """Return GPT-2's weights in the engine's names and orientation: a transform of one's own."""
    turned = {name: one.t() if ".c_" in name and one.dim() == 2 else one for name, one in weights.items()}
    return {reduce(lambda name, old: name.replace(old, NAMES[old]), NAMES, name): one for name, one in turned.items()}


def generate(pipe, scheme, receive_transform):
    """Generate for ever; answer each version that the pipe names with tokens and logits."""
    engine, tokens, wanted = Engine().bfloat16(), torch.zeros(1, 1, dtype=torch.long), None
    options = {"model": engine, "load": engine.load_weights}  # its forwards pass through the gate
    end = scheme or wsync.engine_app(**options, token=TOKEN, receive_transform=receive_transform)
    if scheme is None:
        import uvicorn  # or any other ASGI server

        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(end, lifespan="off", log_level="critical"))
        threading.Thread(target=server.run, args=([listening],), daemon=True).start()
        pipe.send(f"http://127.0.0.1:{listening.getsockname()[1]}")
    else:
        scheme.init_on_receiver("policy", **options, worker_idx=0)
        scheme.connect()
    while True:
        with torch.no_grad(), wsync.gate():  # logits, and the version that they were made with
            logits, version = engine(tokens), int(end.version)
        wanted = pipe.recv() if wanted is None and pipe.poll() else wanted
        if wanted and version >= wanted:
            pipe.send((version, tokens, logits))
            wanted = None
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1) if len(tokens[0]) < LENGTH else tokens[:, :1]


def start_ray_task(scheme):
    """Generate in a Ray task; return the pipe to it."""
    import ray

    key = bytes(multiprocessing.current_process().authkey)

    def task(address):
        multiprocessing.current_process().authkey = key  # of tensors in the pipe as well
        generate(Client(address, authkey=key), scheme, [])

    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        ray.remote(num_cpus=1, max_retries=0)(task).remote(listener.address)
        return listener.accept()


def largest_error(weights, quantised):
    """Return the largest error of a weight in int8, in steps (scales)."""
    scales = {name: quantised[f"{name}_scale"] for name in weights if f"{name}_scale" in quantised}
    return max(((quantised[name] * scales[name] - weights[name]) / scales[name]).abs().max() for name in scales)


def main(name, precision):
    """Train, send, compare."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0)).eval() if GPT2Config else Engine()
    forward = (lambda tokens: model(tokens).logits) if GPT2Config else model
    send = [Exclude("lm_head.weight"), from_gpt2] if GPT2Config else []
    narrow = QuantizeInt8() if precision == "int8" else Cast("bfloat16")
    receive = [Dequantize("bfloat16"), Cast("bfloat16")] if precision == "int8" else []
    print(f"{type(model).__name__} → Engine by {name}, {precision}:")
    (pipe, theirs), scheme = multiprocessing.Pipe(), None
    if name == "ray":
        import ray

        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    folder = tempfile.TemporaryDirectory()
    if name in ("shared_mem", "store", "ray"):
        url = {"url": folder.name} if name == "store" else {}
        scheme = wsync.WeightSyncScheme.from_backend(
            name, send_transform=[*send, narrow], receive_transform=receive, **url
        )
        scheme.init_on_sender("policy", model=model)
    if name == "ray":
        pipe = start_ray_task(scheme)
    else:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=generate, args=(theirs, scheme, receive), daemon=True)
        process.start()
    if scheme is None:
        scheme = wsync.HTTPWeightSyncScheme(pipe.recv(), token=TOKEN, send_transform=[*send, narrow])
        scheme.init_on_sender("policy", model=model)
    scheme.connect()
    optimizer, reference = torch.optim.AdamW(model.parameters(), lr=1e-3), Engine().bfloat16()
    for _ in range(5):
        batch = torch.randint(VOCABULARY, (4, LENGTH))
        optimizer.zero_grad()
        nn.functional.cross_entropy(forward(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        report = scheme.send()
        pipe.send(report.version)
        version, tokens, logits = pipe.recv()
        weights = Chain(send, "reference")(model.state_dict())
        quantised = narrow(weights)
        reference.load_state_dict(Chain(receive, "reference")(quantised))
        with torch.no_grad():
            off, off_float32 = ((logits - one(tokens)).abs().max().item() for one in (reference, forward))
        error = largest_error(weights, quantised) if receive else 0.0
        print(
            f"version {version}: {report.bytes} bytes of {sum(one.nbytes for one in weights.values())}; "
            f"logits {off} off the reference, {off_float32:.4f} off the trainer",
            f"weights at most {error:.4f} steps of int8 off" if receive else "",
            sep="; " if receive else "",
        )
        assert version == report.version and off == 0 and off_float32 < 0.05 * logits.abs().max()
        assert error < 0.5001
    scheme.shutdown()
    if name == "ray":
        ray.shutdown()
    else:
        process.kill()
    folder.cleanup()


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ["shared_mem", "store", "http", "shared_mem-int8"]:
        carrier, _, precision_ = chosen.partition("-")
        main(carrier, precision_ or "bfloat16")
