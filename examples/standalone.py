"""Two workers follow a model that the trainer changes: weight synchronization alone, without environments.

python examples/standalone.py
"""

import torch
from torch import multiprocessing as mp
from torch import nn

import wsync

UPDATES = 3


def work(scheme: wsync.WeightSyncScheme, index: int) -> None:
    """Act with the newest weights until the trainer shuts down."""
    model = nn.Linear(4, 2)
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    scheme.connect()  # waits for the trainer; the model has version 1 afterwards
    while scheme.receive() is not None:  # waits for a newer version; without this call, the next forward installs it
        with wsync.gate():  # nothing is installed between the two reads
            version, output = scheme.version, model(torch.ones(4))
        print(f"worker {index}: version {version}, output {output.tolist()}")
    scheme.shutdown()


if __name__ == "__main__":
    model, scheme = nn.Linear(4, 2), wsync.SharedMemWeightSyncScheme()
    scheme.init_on_sender("policy", model=model, num_workers=2)  # before the scheme is given to workers

    workers = [mp.get_context("spawn").Process(target=work, args=(scheme, index)) for index in range(2)]
    for worker in workers:
        worker.start()
    scheme.connect(processes=workers)  # waits for both (an error if one ends before), and delivers version 1

    for _ in range(UPDATES):
        with torch.no_grad():
            model.weight.add_(1.0)  # in place of training; no effect on the workers until it is sent
        print(scheme.send())  # what the update cost, when both workers have installed it

    scheme.shutdown()  # receive() returns None in the workers
    for worker in workers:
        worker.join()
