"""Weight synchronization for reinforcement learning: a trainer's weights, in every worker, whole and in order."""

from wsync import transforms
from wsync.backends.cuda import CudaWeightSyncScheme
from wsync.backends.distributed import DistributedWeightSyncScheme
from wsync.backends.http import HTTPWeightSyncScheme
from wsync.backends.multiprocess import MPTransport, MultiProcessWeightSyncScheme
from wsync.backends.none import NoWeightSyncScheme
from wsync.backends.ray import RayModuleTransformScheme, RayWeightSyncScheme
from wsync.backends.rpc import RPCWeightSyncScheme
from wsync.backends.shared_mem import SharedMemWeightSyncScheme
from wsync.backends.store import StoreTransport, StoreWeightSyncScheme
from wsync.control.listen import listen_on
from wsync.control.rendezvous import Rendezvous, TorchStoreRendezvous
from wsync.engine.app import engine_app
from wsync.errors import (
    LayoutMismatch,
    NotConnected,
    SyncTimeout,
    WeightSyncError,
    WorkerDied,
    WorkerFailed,
    missing_extra,
)
from wsync.gate import gate, gated
from wsync.legacy import WeightReceiver, WeightSender
from wsync.metrics import SyncMetrics, serve_metrics, trace_updates
from wsync.paths import CollectorContext, NoSuchPath, RemoteWorker, find_model, find_object
from wsync.registry import register_backend, registered_backends
from wsync.scheme import WeightSyncScheme
from wsync.sender import worker_list
from wsync.transaction import synchronize
from wsync.transport import DistributedTransport, RayTransport, RPCTransport, SharedMemTransport, TransportBackend
from wsync.update import SyncReport
from wsync.weights.source import per_worker
from wsync.weights.strategy import WeightStrategy, bytes_of

__all__ = [
    "CollectorContext",
    "CudaWeightSyncScheme",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "HTTPWeightSyncScheme",
    "LayoutMismatch",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "NoSuchPath",
    "NoWeightSyncScheme",
    "NotConnected",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayModuleTransformScheme",
    "RayTransport",
    "RayWeightSyncScheme",
    "RemoteWorker",
    "Rendezvous",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "StoreTransport",
    "StoreWeightSyncScheme",
    "SyncMetrics",
    "SyncReport",
    "SyncTimeout",
    "TorchStoreRendezvous",
    "TransportBackend",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncError",
    "WeightSyncScheme",
    "WorkerDied",
    "WorkerFailed",
    "bytes_of",
    "engine_app",
    "find_model",
    "find_object",
    "gate",
    "gated",
    "listen_on",
    "missing_extra",
    "per_worker",
    "register_backend",
    "registered_backends",
    "serve_metrics",
    "synchronize",
    "trace_updates",
    "transforms",
    "worker_list",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return __all__
