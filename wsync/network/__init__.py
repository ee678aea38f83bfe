"""The ends of a line between any machines: TCP or RPC for words, ``torch.distributed`` for weights."""
