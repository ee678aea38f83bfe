"""The older API with queues: `init_on_sender(pipes=)`, `get_sender`, `init_on_worker`, `get_receiver`."""

import torch
from torch import multiprocessing as mp
from torch import nn

from wsync import MultiProcessWeightSyncScheme


def act(pipe, answers):
    actor = nn.Linear(4, 2)
    scheme = MultiProcessWeightSyncScheme(strategy="state_dict")
    scheme.init_on_worker(model_id="policy", pipe=pipe, model=actor)
    receiver = scheme.get_receiver()
    for _ in range(2):
        while not receiver.receive(timeout=0.001):
            pass
        answers.put(actor.bias.tolist())
    scheme.shutdown()


def main():
    learner, answers = nn.Linear(4, 2), mp.Queue()
    scheme = MultiProcessWeightSyncScheme(strategy="state_dict")
    ours, theirs = mp.Pipe()
    process = mp.Process(target=act, args=(theirs, answers))
    process.start()
    scheme.init_on_sender(model_id="policy", pipes=[ours])
    sender = scheme.get_sender()
    sender.send(learner.state_dict())
    assert answers.get(timeout=30) == learner.bias.tolist()
    with torch.no_grad():
        learner.bias.fill_(3.0)
    sender.send_async(learner.state_dict())
    sender.wait_async()
    assert answers.get(timeout=30) == [3.0, 3.0]
    process.join()
    scheme.shutdown()
    print("delivered")


if __name__ == "__main__":
    main()
