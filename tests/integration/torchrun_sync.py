"""What each rank runs in test_network.py, under torchrun: rank 0 trains, the others act; they meet in several ways."""

import os

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


def synchronise(rank: int, world: int) -> None:
    for _ in range(2):  # a second scheme of the same name meets the second of the others
        scheme = wsync.DistributedWeightSyncScheme(timeout=30.0)
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
        if dist.is_initialized():  # the user's own group is none the worse for it
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == world
        scheme.shutdown()


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    synchronise(rank, world)
    print(f"rank {rank} met in the agent's store")
    dist.init_process_group("gloo")
    synchronise(rank, world)
    print(f"rank {rank} met in the default group's")
    dist.destroy_process_group()  # torch's own threads may abort a process that ends without it


if __name__ == "__main__":
    main()
