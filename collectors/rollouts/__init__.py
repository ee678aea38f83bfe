"""A policy acts in an environment, into a batch that was made beforehand."""
