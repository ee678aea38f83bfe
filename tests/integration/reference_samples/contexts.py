"""The two phases with collectors as contexts: the trainer's has the model to send, the worker's the one that acts."""

import torch
from tensordict.nn import TensorDictModule
from torch import multiprocessing as mp
from torch import nn

from collectors import Collector, GymEnv
from wsync import SharedMemWeightSyncScheme


def make_collector():
    actor = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
    return Collector(lambda: GymEnv("CartPole-v1"), actor, frames_per_batch=8)


def act(scheme, questions, answers):
    inner = make_collector()
    scheme.init_on_receiver(model_id="policy", context=inner, worker_idx=0)
    scheme.connect(worker_idx=0)
    while questions.get(timeout=30):
        batch = next(inner)
        best = inner.policy.module(batch["observation"]).argmax(-1)
        assert torch.equal(batch["action"].argmax(-1), best)
        answers.put(inner.policy.module.bias.tolist())
    scheme.shutdown()
    inner.shutdown()


def main():
    outer, questions, answers = make_collector(), mp.Queue(), mp.Queue()
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", context=outer, num_workers=1)
    worker = mp.Process(target=act, args=(scheme, questions, answers))
    worker.start()
    scheme.connect()
    for value in (1.0, 2.0, 3.0):
        nn.init.constant_(outer.policy.module.bias, value)
        scheme.send(outer.policy)
        questions.put(True)
        assert answers.get(timeout=30) == [value, value]
    questions.put(False)
    worker.join()
    scheme.shutdown()
    outer.shutdown()
    print("delivered")


if __name__ == "__main__":
    main()
