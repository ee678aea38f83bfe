"""The modules of ``scripts/bench_sync.py``."""
