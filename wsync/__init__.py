"""Weight synchronization for reinforcement learning: a trainer's weights, in every worker, whole and in order."""

from wsync.backends.distributed import DistributedTransport, DistributedWeightSyncScheme
from wsync.backends.multiprocess import MPTransport, MultiProcessWeightSyncScheme
from wsync.backends.none import NoWeightSyncScheme
from wsync.backends.shared_mem import SharedMemTransport, SharedMemWeightSyncScheme
from wsync.errors import LayoutMismatch, NotConnected, SyncTimeout, WeightSyncError, WorkerDied, WorkerFailed
from wsync.gate import gate
from wsync.metrics import MetricsSink, SyncMetrics
from wsync.paths import find_model
from wsync.scheme import WeightSyncScheme
from wsync.strategy import WeightStrategy
from wsync.transaction import synchronize
from wsync.transport import TransportBackend
from wsync.types import CascadingContext, CollectorContext, RemoteWorker, SyncReport

__all__ = [
    "CascadingContext",
    "CollectorContext",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "LayoutMismatch",
    "MPTransport",
    "MetricsSink",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "NotConnected",
    "RemoteWorker",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "SyncMetrics",
    "SyncReport",
    "SyncTimeout",
    "TransportBackend",
    "WeightStrategy",
    "WeightSyncError",
    "WeightSyncScheme",
    "WorkerDied",
    "WorkerFailed",
    "find_model",
    "gate",
    "synchronize",
]
