"""The two phases without a collector: init at both ends, then connect at both, then `send()` without arguments."""

import torch
from tensordict import TensorDict
from torch import multiprocessing as mp
from torch import nn

from wsync import SharedMemWeightSyncScheme


def act(scheme, worker_idx, questions, answers):
    actor = nn.Linear(4, 2)
    scheme.init_on_receiver(model_id="policy", model=actor, worker_idx=worker_idx)
    scheme.connect(worker_idx=worker_idx)
    while questions.get(timeout=30):
        answers.put((worker_idx, actor(torch.ones(4)).tolist()))
    scheme.shutdown()


def main():
    learner = nn.Linear(4, 2)
    questions, answers = [mp.Queue(), mp.Queue()], mp.Queue()
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(
        model_id="policy", weights=TensorDict.from_module(learner), devices=[torch.device("cpu")] * 2, num_workers=2
    )
    workers = [mp.Process(target=act, args=(scheme, idx, questions[idx], answers)) for idx in range(2)]
    for worker in workers:
        worker.start()
    scheme.connect()
    for epoch in range(10):
        with torch.no_grad():
            learner.bias.add_(float(epoch))
        scheme.send()
        for question in questions:
            question.put(True)
        acted = dict(answers.get(timeout=30) for _ in workers)
        assert acted == {idx: learner(torch.ones(4)).tolist() for idx in range(2)}
    for question in questions:
        question.put(False)
    scheme.shutdown()
    for worker in workers:
        worker.join()
    print("delivered")


if __name__ == "__main__":
    main()
