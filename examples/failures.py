"""A worker is killed: the trainer gets an error that names it, starts another process, and continues.

python examples/failures.py
"""

import os
import signal

import torch
from torch import multiprocessing as mp
from torch import nn

import wsync

UPDATES, KILLED_AT = 6, 3
CONTEXT = mp.get_context("spawn")


def work(scheme: wsync.WeightSyncScheme, index: int) -> None:
    """Act with the newest weights until the trainer shuts down."""
    torch.set_num_threads(1)
    model = nn.Linear(4, 2)
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    scheme.connect()  # a replacement gets the newest weights here
    print(f"worker {index} (process {os.getpid()}) begins with version {scheme.version}")
    while scheme.receive() is not None:  # if the trainer dies instead, NotConnected is raised
        model(torch.ones(4))
    scheme.shutdown()


def start(scheme: wsync.WeightSyncScheme, index: int) -> mp.Process:
    """Start a worker."""
    process = CONTEXT.Process(target=work, args=(scheme, index))
    process.start()
    return process


if __name__ == "__main__":
    model, scheme = nn.Linear(4, 2), wsync.SharedMemWeightSyncScheme()
    scheme.init_on_sender("policy", model=model, num_workers=2)
    workers = [start(scheme, index) for index in range(2)]
    scheme.connect(processes=workers)

    for update in range(UPDATES):
        if update == KILLED_AT:
            os.kill(workers[1].pid, signal.SIGKILL)
            workers[1].join()
        nn.init.normal_(model.weight)  # in place of training
        try:
            scheme.send()
            print(f"version {scheme.version} is in both workers")
        except wsync.WorkerDied as error:  # worker 0 has the update all the same
            print(f"version {scheme.version}: {error}")
            for index in error.workers:
                workers[index] = start(scheme, index)
                scheme.readmit(index, workers[index])  # waits until it has the newest weights

    scheme.shutdown()
    for worker in workers:
        worker.join()
