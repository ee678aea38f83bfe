"""The older API with shared memory: the first `send` registers the model; updates need no call in the worker."""

from tensordict import TensorDict
from torch import multiprocessing as mp
from torch import nn, ones

from wsync import SharedMemWeightSyncScheme


def act(pipe, questions, answers):
    actor = nn.Linear(4, 2)
    scheme = SharedMemWeightSyncScheme(strategy="tensordict", auto_register=True)
    scheme.init_on_worker(model_id="policy", pipe=pipe, model=actor)
    while questions.get(timeout=30):
        answers.put(actor(ones(4)).tolist())
    scheme.shutdown()


def main():
    learner, questions, answers = nn.Linear(4, 2), mp.Queue(), mp.Queue()
    scheme = SharedMemWeightSyncScheme(strategy="tensordict", auto_register=True)
    ours, theirs = mp.Pipe()
    process = mp.Process(target=act, args=(theirs, questions, answers))
    process.start()
    scheme.init_on_sender(model_id="policy", pipes=[ours])
    sender = scheme.get_sender()
    for value in (1.0, 2.0):
        nn.init.constant_(learner.weight, value)
        sender.send(TensorDict.from_module(learner))
        questions.put(True)
        assert answers.get(timeout=30) == learner(ones(4)).tolist()
    questions.put(False)
    process.join()
    scheme.shutdown()
    print("delivered")


if __name__ == "__main__":
    main()
