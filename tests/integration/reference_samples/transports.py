"""A transport without a scheme: set up, then received with `weights`, `model` and `strategy` as arguments."""

from tensordict import TensorDict
from torch import multiprocessing as mp
from torch import nn

from wsync import MPTransport, WeightStrategy


def act(weight_queue, ack_queue, answers):
    transport, strategy = MPTransport(weight_queue, ack_queue), WeightStrategy("tensordict")
    actor = nn.Linear(4, 2)
    buffer = TensorDict.from_module(actor).data.clone()
    transport.setup_connection_and_weights_on_receiver(worker_idx=0, weights=buffer, model=actor, strategy=strategy)
    answers.put((actor.bias.tolist(), buffer["bias"].tolist()))
    transport.receive_weights(timeout=None, weights=buffer, model=actor, strategy=strategy)
    answers.put((actor.bias.tolist(), buffer["bias"].tolist()))
    answers.put(transport.receive_weights(timeout=0.01, weights=buffer, model=actor, strategy=strategy))


def main():
    learner, weight_queue, ack_queue, answers = nn.Linear(4, 2), mp.Queue(), mp.Queue(), mp.Queue()
    transport = MPTransport(weight_queue=weight_queue, ack_queue=ack_queue, timeout=30.0)
    worker = mp.Process(target=act, args=(weight_queue, ack_queue, answers))
    worker.start()
    transport.setup_connection_and_weights_on_sender()
    for value in (1.0, 2.0):
        nn.init.constant_(learner.bias, value)
        transport.send_weights(learner)
        assert answers.get(timeout=30) == ([value] * 2, [value] * 2)
    assert answers.get(timeout=30) is None
    worker.join()
    print("delivered")


if __name__ == "__main__":
    main()
