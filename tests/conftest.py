"""For all tests: no threads on busy cores, one fork server, a signal that shells ignore; and a profile for fuzzing."""

import signal
from multiprocessing import forkserver

import torch
from hypothesis import settings

settings.register_profile("long", max_examples=3_000, deadline=None)  # pytest --hypothesis-profile=long
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and theirs, ignore it
forkserver.set_forkserver_preload(["collectors.worker"])  # there is one server: whoever needs it first, all gain
