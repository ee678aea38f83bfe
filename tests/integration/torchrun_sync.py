"""What each rank runs in test_network.py, under torchrun: rank 0 trains, the others act; a mode says how they meet."""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed as dist
from torch import nn

import wsync


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def forward(self) -> torch.Tensor:
        return self.weight.detach().aminmax().min


def main(mode: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if mode != "agent":
        dist.init_process_group("gloo")
    group = dist.new_group(list(range(world))) if mode == "group" else None
    for _ in range(2):  # a second scheme of the same name meets the second of the others
        scheme = wsync.DistributedWeightSyncScheme(timeout=30.0, group=group)
        model = Small()
        if rank == 0:
            scheme.init_on_sender("policy", model=model, num_workers=world - 1)
            scheme.connect()
            for version in range(2, 20):
                nn.init.constant_(model.weight, version)
                scheme.send()
        else:
            scheme.init_on_receiver("policy", model=model, worker_idx=rank - 1)
            scheme.connect()
            while scheme.version < 19:
                assert scheme.receive(timeout=30.0) is not None
            assert model() == 19
        if mode != "agent":  # the user's own group is none the worse for it
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == world
        scheme.shutdown()
    print(f"rank {rank} is content")


if __name__ == "__main__":
    main(sys.argv[1])
