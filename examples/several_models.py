"""Two models that change together: a worker never acts with a new actor and an old encoder.

python examples/several_models.py
"""

import torch
from torch import multiprocessing as mp
from torch import nn

import wsync

UPDATES = 5


def work(schemes: dict[str, wsync.WeightSyncScheme], index: int) -> None:
    """Forward through both models, in one block, until the last version."""
    models = {"encoder": nn.Linear(1, 1, bias=False), "actor": nn.Linear(1, 1, bias=False)}
    for name, scheme in schemes.items():
        scheme.init_on_receiver(name, model=models[name], worker_idx=index)
        scheme.connect()
    versions, x = {1}, torch.ones(1)
    while max(versions) < 1 + UPDATES:
        with wsync.gate(), torch.no_grad():  # nothing is installed inside the block
            encoder, actor = models["encoder"](x).item(), models["actor"](x).item()
            version = schemes["actor"].version
        assert encoder == actor, "two versions were mixed"
        versions.add(version)
    print(f"worker {index}: both models changed together, versions {sorted(versions)}")
    for scheme in schemes.values():
        scheme.shutdown()


if __name__ == "__main__":
    models = {"encoder": nn.Linear(1, 1, bias=False), "actor": nn.Linear(1, 1, bias=False)}
    schemes = {name: wsync.MultiProcessWeightSyncScheme() for name in models}  # a scheme for each model
    for name, scheme in schemes.items():
        nn.init.constant_(models[name].weight, 1.0)
        scheme.init_on_sender(name, model=models[name], num_workers=2)

    workers = [mp.get_context("spawn").Process(target=work, args=(schemes, index)) for index in range(2)]
    for worker in workers:
        worker.start()
    for scheme in schemes.values():
        scheme.connect(processes=workers)

    for value in range(2, 2 + UPDATES):
        for model in models.values():
            nn.init.constant_(model.weight, float(value))
        reports = wsync.synchronize({schemes[name]: models[name] for name in models})  # all workers, or none
        print({name: report.version for name, report in reports.items()})

    for worker in workers:
        worker.join()
    for scheme in schemes.values():
        scheme.shutdown()
