"""A trainer and workers on one machine or several, started by torchrun: rank 0 trains, the other ranks act.

On one machine, to try it:

    torchrun --standalone --nproc-per-node 3 examples/several_machines.py

On two, each with its own ``--node-rank``; 10.0.0.1 is an address of the first, which the second reaches:

    torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 4 examples/several_machines.py
    torchrun --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --nproc-per-node 4 examples/several_machines.py

Machines without a common home folder need ``WSYNC_AUTHKEY`` in the environment, the same long random value on all.
"""

import os

import torch
from torch import nn

import wsync

UPDATES = 5
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train(scheme: wsync.WeightSyncScheme) -> None:
    """Change the model and send it."""
    model = nn.Linear(256, 256)
    scheme.init_on_sender("policy", model=model, num_workers=WORLD_SIZE - 1)
    scheme.connect()  # waits for all ranks
    for _ in range(UPDATES):
        nn.init.normal_(model.weight)  # in place of training
        print(scheme.send())


def act(scheme: wsync.WeightSyncScheme) -> None:
    """Act with the newest weights until the last version."""
    model = nn.Linear(256, 256)
    scheme.init_on_receiver("policy", model=model, worker_idx=RANK - 1)
    scheme.connect()  # looks the trainer's address up in torchrun's store
    while scheme.version < 1 + UPDATES:
        scheme.receive(timeout=60)
    with torch.no_grad():
        print(f"rank {RANK}: version {scheme.version}, output {model(torch.ones(256)).mean():.4f}")


if __name__ == "__main__":
    # A worker on the trainer's machine reads the weights from its memory; to others they go over the network.
    with wsync.DistributedWeightSyncScheme(host=os.environ["MASTER_ADDR"]) as scheme:
        train(scheme) if RANK == 0 else act(scheme)
