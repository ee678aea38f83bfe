"""Readers of a store behind a link of 100 Mbit/s: exact differences beside whole checkpoints, in one table.

A small transformer is trained, then fine-tuned in steps of a small learning rate. Each version goes to one store that
has it whole, and to one with differences; the readers, in a network namespace, read both over HTTP, and every version
is compared with the trainer's bit for bit. Needs root, `ip`, `tc`, `transformers`,
`aiohttp` and `requests`.

python examples/slow_link.py 16 50 1e-6      # readers, versions, learning rate
"""

import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import fsspec
import torch
import xxhash
from torch.nn import functional

import wsync

RATE, NAME, HERE, THERE, NEAR, FAR = "100mbit", "wsync-slow", "10.211.9.1", "10.211.9.2", "slow-near", "slow-far"
INSIDE = f"ip netns exec {NAME}"
LINK = [
    *(f"ip netns add {NAME}", f"ip link add {NEAR} type veth peer name {FAR} netns {NAME}"),
    *(f"ip addr add {HERE}/24 dev {NEAR}", f"ip link set {NEAR} up", f"{INSIDE} ip addr add {THERE}/24 dev {FAR}"),
    f"{INSIDE} ip link set {FAR} up",
    f"{INSIDE} sysctl -q net.ipv4.tcp_congestion_control=reno",
    f"tc qdisc add dev {NEAR} root tbf rate {RATE} burst 256kb latency 200ms",
]
FORMS = {"whole": {}, "differences": {"anchor_every": 10}}
TRAINING_STEPS, STEPS = 300, 2  # before the first version; between two versions


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; connections stay open."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Takes the connections of all readers at once."""

    request_queue_size = 128

    def server_bind(self) -> None:
        """Set the congestion control that connections inherit: BBR floods a link as short as this one."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        super().server_bind()


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Return a digest of all bits of the weights."""
    found = xxhash.xxh3_64()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def read() -> None:
    """Read the next version of the store that each line names, `new URL` as a reader that has just come."""
    torch.set_num_threads(1)
    # A file may take any time, as the readers share the link; a connection that stalls is given up, and begun anew.
    fsspec.config.conf["http"] = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None, sock_read=30)}}
    stores: dict[str, wsync.StoreTransport] = {}
    for line in sys.stdin:
        *new, url = line.split()
        transport = wsync.StoreTransport(url) if new else stores.setdefault(url, wsync.StoreTransport(url))
        weights = None
        while weights is None:
            try:
                weights = transport.receive_weights(600.0)
            except wsync.WeightSyncError as error:
                print(f"read again: {error}", file=sys.stderr, flush=True)
        print(digest(weights.flatten_keys(".").to_dict()), flush=True)


def make_model() -> torch.nn.Module:
    """Return a transformer of 3.5 million parameters, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, successors: torch.Tensor, steps: int) -> float:
    """Take some steps on synthetic text, a Markov chain of tokens; return the last loss."""
    for _ in range(steps):
        tokens = [torch.randint(len(successors), (4,))]
        for _ in range(31):
            tokens.append(successors[tokens[-1], torch.randint(successors.shape[1], (4,))])
        text = torch.stack(tokens, 1)
        logits = model(text[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def measure(readers: list[subprocess.Popen[str]], line: str, expected: str) -> tuple[float, float]:
    """Have readers read; return the seconds until the last has the version, and the bytes on the link, of each."""
    counter = Path(f"/sys/class/net/{NEAR}/statistics/tx_bytes")
    before, began = int(counter.read_text()), time.perf_counter()
    for reader in readers:
        reader.stdin.write(f"{line}\n")
        reader.stdin.flush()
    assert {reader.stdout.readline().strip() for reader in readers} == {expected}, "a reader has other weights"
    return time.perf_counter() - began, (int(counter.read_text()) - before) / len(readers)


def main(count: int, versions: int, rate: float) -> None:
    """Publish, have all versions read, and print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, successors = make_model(), torch.randint(512, (512, 4))
    train(model, torch.optim.AdamW(model.parameters(), 1e-3), successors, TRAINING_STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), rate)  # of float32 weights, which are sent in bfloat16
    with tempfile.TemporaryDirectory() as folder:
        server = Server((HERE, 0), partial(Handler, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [*INSIDE.split(), sys.executable, __file__, "--read"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        readers = [subprocess.Popen(command, **pipes) for _ in range(count)]
        stores = {name: wsync.StoreTransport(f"{folder}/{name}", **form) for name, form in FORMS.items()}
        figures = {name: [] for name in stores}
        for transport in stores.values():
            transport.setup_connection_and_weights_on_sender()
        for version in range(versions):
            loss = train(model, optimizer, successors, STEPS)
            weights = {name: one.bfloat16() for name, one in model.state_dict().items()}
            for name, transport in stores.items():  # in turn: both meet the same load
                began = time.perf_counter()
                transport.send_weights(weights)
                published = time.perf_counter() - began
                url = f"http://{HERE}:{server.server_port}/{name}"
                followed = measure(readers, url, digest(weights))
                new = measure(readers[:1], f"new {url}", digest(weights))
                if version:  # the first one is whole in both
                    figures[name].append((published, *followed, *new))
        for reader in readers:
            reader.stdin.close()
            reader.wait()
        server.shutdown()
    nbytes = sum(one.nbytes for one in weights.values())
    print(f"{nbytes:,} bytes of bfloat16, {count} readers, {versions} versions, {RATE}, learning rate {rate:g}")
    print(f"loss {loss:.3f}; every version of every reader was exact")
    print(
        "| store | bytes a version and reader | all have it: median; slowest | a new reader: bytes; median | `send` |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name, rows in figures.items():
        published, seconds, carried, new_seconds, new_carried = zip(*rows, strict=True)
        print(
            f"| {name} | {statistics.mean(carried):,.0f} ({statistics.mean(carried) / nbytes:.1%}) "
            f"| {statistics.median(seconds):.2f} s; {max(seconds):.2f} s "
            f"| {statistics.mean(new_carried):,.0f}; {statistics.median(new_seconds):.2f} s "
            f"| {statistics.median(published):.3f} s |"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--read"]:
        read()
    else:
        try:
            for command in LINK:
                subprocess.run(command.split(), check=True)
            main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
        finally:
            subprocess.run(["ip", "netns", "delete", NAME], check=False)
