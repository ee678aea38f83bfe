"""For all tests: small networks lose by threads, most of all on busy cores."""

import torch

torch.set_num_threads(1)
