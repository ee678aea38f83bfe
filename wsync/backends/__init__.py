"""One file per backend: how bytes and an instruction reach a worker, and how its answer comes back."""
