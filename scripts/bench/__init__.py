"""The parts of ``scripts/bench_sync.py``."""
