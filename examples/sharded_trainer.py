"""A trainer with a model that FSDP2 shards: all ranks gather the weights, and rank 0 sends them to the workers.

Given the URL of a store, all ranks also write each version to it, without the whole model on one of them.

torchrun --standalone --nproc-per-node 2 examples/sharded_trainer.py [URL]
"""

import os
import sys
from contextlib import nullcontext
from multiprocessing.connection import Connection

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wsync

UPDATES, STEPS, WORKERS = 5, 4, 2
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def make_model() -> nn.Sequential:
    """Return a model that is not sharded."""
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))


def work(scheme: wsync.WeightSyncScheme, index: int, result: Connection) -> None:
    """Act with the newest weights until the trainer shuts down; then hand them back, to be compared."""
    torch.set_num_threads(1)
    model = make_model()  # whole: a worker is not a rank
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    scheme.connect()
    while scheme.receive() is not None:  # NotConnected is raised if rank 0 dies
        with torch.no_grad():
            model(torch.ones(64))
    result.send((scheme.version, {name: tensor.numpy() for name, tensor in model.state_dict().items()}))
    scheme.shutdown()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    """Take some steps. Each rank has batches of its own; FSDP2 averages the gradients."""
    for _ in range(STEPS):
        inputs = torch.randn(32, 64, device=device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs[:, :8]).backward()
        optimizer.step()


def main() -> None:
    """Train in all ranks, and send from rank 0."""
    device = "cuda" if torch.cuda.device_count() >= WORLD_SIZE else "cpu"
    mesh = init_device_mesh(device, (WORLD_SIZE,))  # with gloo on CPUs, NCCL on GPUs
    torch.manual_seed(0)  # the same first weights in all ranks
    model = make_model().to(device)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(RANK)

    store = wsync.StoreWeightSyncScheme(sys.argv[1], layout="hf") if sys.argv[1:] else None
    if store:
        store.init_on_sender("policy", model=model)  # in all ranks

    weights = get_model_state_dict(model, options=WHOLE)  # a call of all ranks; it returns {} in all but rank 0
    with wsync.SharedMemWeightSyncScheme() if RANK == 0 else nullcontext() as scheme:
        if scheme:
            scheme.init_on_sender("policy", num_workers=WORKERS)  # without the model: every send is given weights
            context = mp.get_context("spawn")
            pipes = [context.Pipe(duplex=False) for _ in range(WORKERS)]
            workers = [
                context.Process(target=work, args=(scheme, index, pipes[index][1]), daemon=True)
                for index in range(WORKERS)
            ]
            for worker, (_, result) in zip(workers, pipes, strict=True):
                worker.start()
                result.close()
            scheme.connect(weights=weights, processes=workers)
        for _ in range(UPDATES):
            train(model, optimizer, device)
            if store:
                store.send_shards()  # a call of all ranks
            weights = get_model_state_dict(model, options=WHOLE)
            if scheme:
                report = scheme.send(weights)
                print(report)
    if RANK == 0:  # at the end of the block the scheme was shut down: receive() returns None in the workers
        for worker, (pipe, _) in zip(workers, pipes, strict=True):
            version, own = pipe.recv()
            assert version == report.version
            assert all(torch.equal(weights[name], torch.from_numpy(own[name])) for name in weights)
            worker.join()
        if store:  # as any process reads it, on any machine
            stored = wsync.StoreTransport(f"{store.url}/policy").receive_weights(timeout=60.0).flatten_keys(".")
            assert all(torch.equal(weights[name], stored[name]) for name in weights)
        print(f"version {report.version}, {report.bytes} bytes: both workers have the gathered weights")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # when the sharded model is gone
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the end of the interpreter: https://github.com/pytorch/pytorch/issues/190489
