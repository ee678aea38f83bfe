"""Collectors whose workers are reached by other means than pipes: TCP, RPC, Ray."""

from collectors.distributed.tcp import DistributedCollector
from collectors.distributed.tcp_worker import is_worker, join_trainer

__all__ = ["DistributedCollector", "is_worker", "join_trainer"]
