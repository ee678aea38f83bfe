"""Environments as arrays: spaces, steps, and what transforms make of them."""
