"""Inference engines that are updated over HTTP, by the protocol of vLLM's weight transfer: both halves of it."""
