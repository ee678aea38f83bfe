"""The parts of ``wsync.receiver.Receiver``: what a worker does with an update, the same for every backend."""
