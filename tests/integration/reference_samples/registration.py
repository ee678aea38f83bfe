"""Shared memory with models that register themselves, and with buffers that are registered before."""

import torch
from tensordict import TensorDict
from torch import multiprocessing as mp
from torch import nn

from wsync import SharedMemWeightSyncScheme


def act(scheme, answers):
    actor = nn.Linear(4, 2)
    scheme.init_on_receiver(model_id="policy", model=actor, worker_idx=0)
    scheme.connect()
    while scheme.version < 2:
        scheme.receive(timeout=30)
    answers.put(actor.bias.tolist())
    scheme.shutdown()


def deliver(scheme, weights):
    answers = mp.Queue()
    scheme.init_on_sender(model_id="policy", num_workers=1)
    worker = mp.Process(target=act, args=(scheme, answers))
    worker.start()
    scheme.connect()
    while scheme.version < 2:
        scheme.send(weights)
    assert answers.get(timeout=30) == [5.0, 5.0]
    worker.join()
    scheme.shutdown()


def main():
    learner = nn.Linear(4, 2)
    nn.init.constant_(learner.bias, 5.0)
    deliver(SharedMemWeightSyncScheme(), TensorDict.from_module(learner))

    explicit = SharedMemWeightSyncScheme(auto_register=False)
    buffers = TensorDict.from_module(learner).data.clone().zero_().share_memory_()
    explicit.register_shared_weights("policy", buffers)
    deliver(explicit, learner)
    assert torch.equal(buffers["bias"], learner.bias)
    print("delivered")


if __name__ == "__main__":
    main()
