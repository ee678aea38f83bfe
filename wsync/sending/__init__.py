"""The parts of ``wsync.sender.Sender``: what a trainer does with an update, the same for every backend."""
