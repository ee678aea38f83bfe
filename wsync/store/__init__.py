"""Versions of a model's weights as files: written by one trainer, read by any number of workers."""
