"""Cut the network between a trainer and a worker at random moments of an update, and check what ``send`` promises.

The worker is in network and PID namespaces of its own, as on another machine. A cut drops every packet, silently. Each
``send`` has to end within its timeout, and to name the worker if it fails; no forward is torn or goes back; after the
cut the worker gets what is sent. Needs root, ``ip`` and ``tc``; prints one line for each cut.

    python scripts/check_cuts.py gloo 1,5 20      # socket, gloo or http; the seconds; 20 times each way: 120 cuts
"""

from __future__ import annotations

import json
import pickle
import random
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from itertools import product

import uvicorn
from torch import nn

import wsync
from wsync.testing.models import fill

TIMEOUT, SLACK, RECOVERY, PORT = 3.0, 1.0, 40.0, 8000
NAME, HERE, THERE, NEAR, FAR = "wsync-cut", "10.211.8.1", "10.211.8.2", "wsync-near", "wsync-far"
INSIDE = f"ip netns exec {NAME}"
CABLE = [
    *(f"ip netns add {NAME}", f"ip link add {NEAR} type veth peer name {FAR} netns {NAME}"),
    *(f"ip addr add {HERE}/24 dev {NEAR}", f"ip link set {NEAR} up", f"{INSIDE} ip addr add {THERE}/24 dev {FAR}"),
    *(f"{INSIDE} ip link set {FAR} up", f"{INSIDE} ip link set lo up"),
    f"tc qdisc add dev {NEAR} root tbf rate 400mbit burst 256kb latency 50ms",  # an update takes some 0.2 s
]
TO, FROM = f"ip neigh {{}} {THERE} dev {NEAR}", f"{INSIDE} ip neigh {{}} {HERE} dev {FAR}"
WAYS = {"to": [TO], "from": [FROM], "both": [TO, FROM]}


def run(*commands: str) -> None:
    """Run them, one after the other."""
    for command in commands:
        subprocess.run(command.split(), check=True)


def follow(model: nn.Module, scheme: str) -> None:
    """Receive by a scheme, and connect again after each loss; without a scheme, serve as an engine."""
    if not scheme:
        uvicorn.run(wsync.engine_app(model, token=None), host=THERE, port=PORT, log_level="critical")
    receiver = pickle.loads(bytes.fromhex(scheme))
    while True:
        with suppress(wsync.WeightSyncError):
            receiver.init_on_receiver("policy", model=model, worker_idx=0)
            receiver.connect()
            while receiver.receive() is not None:
                pass
        receiver.shutdown()
        time.sleep(0.1)  # between two attempts to connect


def worker(scheme: str) -> None:
    """Follow the trainer, and answer each line with what was seen."""
    model, seen, before = fill(nn.Linear(1400, 1400, bias=False), 0), Counter[str](), 0.0
    threading.Thread(target=follow, args=(model, scheme), daemon=True).start()
    while True:
        with wsync.gate():
            low, high = model.weight.min().item(), model.weight.max().item()
        seen.update(torn=low != high, older=low < before)
        before = low
        if select.select([sys.stdin], [], [], 0.02)[0] and sys.stdin.readline():
            print(json.dumps({**seen, "value": low}), flush=True)


def cut(way: str, seconds: float) -> None:
    """Drop all packets in one direction, or in both, for some seconds."""
    time.sleep(random.uniform(0.2, 0.5))  # a random moment of an update
    run(*(f"{command.format('replace')} lladdr 02:00:00:00:00:99 nud permanent" for command in WAYS[way]))
    time.sleep(seconds)  # the length of the cut
    run(*(command.format("del") for command in WAYS[way]))


def check(medium: str, lengths: list[float], rounds: int) -> None:
    """Cut, and check; AssertionError: a promise is broken."""
    value, model, scheme = 1, nn.Linear(1400, 1400, bias=False), wsync.HTTPWeightSyncScheme(f"http://{THERE}:{PORT}")
    if medium != "http":
        scheme = wsync.DistributedWeightSyncScheme(host=HERE, inline_bytes=0 if medium == "gloo" else 1 << 30)

    def send() -> str:
        started = time.monotonic()
        try:
            scheme.send(fill(model, value))
            return "sent"
        except wsync.WeightSyncError as error:
            assert "worker 0" in str(error), error
            return type(error).__name__
        finally:
            assert time.monotonic() - started < TIMEOUT + SLACK, f"send took {time.monotonic() - started:.1f} s"

    with ExitStack() as stack:
        stack.callback(run, f"ip netns delete {NAME}")
        run(*CABLE)
        stack.enter_context(scheme).init_on_sender("policy", model=fill(model, value), num_workers=1)
        command = f"{INSIDE} unshare --pid --fork --kill-child --mount-proc {sys.executable} {__file__} --worker"
        command = [*command.split(), "" if medium == "http" else pickle.dumps(scheme).hex()]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        stack.callback(process.kill)
        scheme.connect()
        scheme.timeout = TIMEOUT
        for _, way, seconds in product(range(rounds), WAYS, lengths):
            outcomes = Counter[str]()
            (cutting := threading.Thread(target=cut, args=(way, seconds))).start()
            while cutting.is_alive():
                value += 1
                outcomes[send()] += 1
                time.sleep(0.05)  # without a worker, `send` raises at once
            whole = time.monotonic()
            while send() != "sent":
                value += 1
                assert time.monotonic() < whole + RECOVERY, "it has not recovered"
                with suppress(wsync.WeightSyncError):
                    scheme.readmit(0)
            process.stdin.write("?\n")  # type: ignore
            seen, took = json.loads(process.stdout.readline()), time.monotonic() - whole  # type: ignore
            assert seen == {"torn": 0, "older": 0, "value": value}, seen
            print(f"{medium}, {way}, {seconds:g} s: {dict(outcomes)}, recovered in {took:.1f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(sys.argv[2])
    check(sys.argv[1], [float(seconds) for seconds in sys.argv[2].split(",")], int(sys.argv[3]))
