"""Weight synchronization for reinforcement learning: a trainer's weights, in every worker, whole and in order."""

__version__ = "0.1.0"
