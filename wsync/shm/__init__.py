"""Shared memory: one arena of slots for all workers on the sender's machine."""
