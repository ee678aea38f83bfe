"""The parts of ``scripts/check_torn.py``."""
