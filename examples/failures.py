"""A worker is killed, and one is stopped: the trainer gets an error that names it, and starts another process.

python examples/failures.py
"""

import os
import signal

import torch
from torch import multiprocessing as mp
from torch import nn

import wsync

UPDATES, KILLED_AT, STOPPED_AT = 6, 1, 2
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
    """Start a worker. It is not a daemon: it ends by itself when the trainer has ended."""
    process = CONTEXT.Process(target=work, args=(scheme, index))
    process.start()
    return process


def replace(scheme: wsync.WeightSyncScheme, workers: list[mp.Process], index: int) -> None:
    """End a worker that may be dead already, and have another one join in its place."""
    scheme.disconnect(index)
    workers[index].kill()  # not terminate(), which has no effect on a stopped process
    workers[index].join()
    workers[index] = start(scheme, index)
    # Optional: waits until it has the newest weights. A process takes seconds to start, longer than scheme.timeout.
    scheme.readmit(index, workers[index], timeout=60)


if __name__ == "__main__":
    model, scheme = nn.Linear(4, 2), wsync.SharedMemWeightSyncScheme()
    scheme.init_on_sender("policy", model=model, num_workers=2)
    workers = [start(scheme, index) for index in range(2)]
    scheme.connect(processes=workers)
    scheme.timeout = 3.0  # seconds after which a worker that does not answer is given up

    for update in range(UPDATES):
        if update == KILLED_AT:
            workers[1].kill()
            workers[1].join()
        if update == STOPPED_AT:
            os.kill(workers[0].pid, signal.SIGSTOP)  # like a worker that hangs: one of the next updates fails
        nn.init.normal_(model.weight)  # in place of training
        try:
            scheme.send()
            print(f"version {scheme.version} is in both workers")
        except (wsync.WorkerDied, wsync.SyncTimeout) as error:  # the other worker has the update all the same
            print(f"{type(error).__name__}: {error}")
            for index in error.workers:
                replace(scheme, workers, index)

    scheme.shutdown()
    for worker in workers:
        worker.join(10)
        worker.kill()  # it may have stopped after its last answer only
