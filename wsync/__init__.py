"""Weight synchronization for reinforcement learning: a trainer's weights, in every worker, whole and in order."""

from importlib import import_module
from typing import TYPE_CHECKING

from wsync import lean_import  # isort: skip  # noqa: F401  before anything else imports tensordict
from wsync.backends.distributed import DistributedTransport, DistributedWeightSyncScheme
from wsync.backends.multiprocess import MPTransport, MultiProcessWeightSyncScheme
from wsync.backends.none import NoWeightSyncScheme
from wsync.backends.rpc import RPCTransport, RPCWeightSyncScheme
from wsync.backends.shared_mem import SharedMemTransport, SharedMemWeightSyncScheme
from wsync.errors import LayoutMismatch, NotConnected, SyncTimeout, WeightSyncError, WorkerDied, WorkerFailed
from wsync.legacy import WeightReceiver, WeightSender
from wsync.metrics import SyncMetrics
from wsync.network.listening import listen_on
from wsync.paths import find_model
from wsync.receiving.gate import gate, gated
from wsync.scheme import WeightSyncScheme
from wsync.sending.membership import worker_list
from wsync.sending.source import per_worker
from wsync.transaction import synchronize
from wsync.transport import TransportBackend
from wsync.types import CascadingContext, CollectorContext, RemoteWorker, SyncReport
from wsync.weights.strategy import WeightStrategy

if TYPE_CHECKING:
    from wsync.backends.ray import RayModuleTransformScheme, RayTransport, RayWeightSyncScheme

__all__ = [
    "CascadingContext",
    "CollectorContext",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "LayoutMismatch",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "NotConnected",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayModuleTransformScheme",
    "RayTransport",
    "RayWeightSyncScheme",
    "RemoteWorker",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "SyncMetrics",
    "SyncReport",
    "SyncTimeout",
    "TransportBackend",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncError",
    "WeightSyncScheme",
    "WorkerDied",
    "WorkerFailed",
    "find_model",
    "gate",
    "gated",
    "listen_on",
    "per_worker",
    "synchronize",
    "worker_list",
]

_WITH_RAY = {"RayModuleTransformScheme", "RayTransport", "RayWeightSyncScheme"}


def __getattr__(name: str) -> object:
    """What needs Ray is imported when it is asked for: Ray is slow to import, and most runs do without."""
    if name in _WITH_RAY:
        return getattr(import_module("wsync.backends.ray"), name)
    raise AttributeError(f"module 'wsync' has no attribute '{name}'")
