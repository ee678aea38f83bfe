"""For all tests: small networks lose by threads, most of all on busy cores; and a profile for long fuzzing."""

import signal

import torch
from hypothesis import settings

settings.register_profile("long", max_examples=3_000, deadline=None)  # pytest --hypothesis-profile=long
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and theirs, ignore it
