"""A store: each version a file, published by atomic rename; a trainer and its readers need not be connected."""

from __future__ import annotations

import os
import re
from typing import Any, ClassVar, Unpack
from urllib.parse import quote

from torch import nn

from wsync.deadlines import deadline_in
from wsync.errors import SyncTimeout
from wsync.options import SchemeOptions
from wsync.scheme import WeightSyncScheme
from wsync.sender import Sender
from wsync.sending.source import DeviceMap, Source
from wsync.store.receiving import StoreReceiveChannel
from wsync.store.sending import SAME_WEIGHTS, StoreSendChannel, publish
from wsync.store.versions import VersionStore, require_keep
from wsync.transforms.chain import delta_of
from wsync.transport import apply_received
from wsync.weights.packing import packed
from wsync.weights.strategy import Format, WeightStrategy


class StoreWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization through files: a shared folder, S3, or whatever else ``fsspec`` reads.

    A finished ``send`` means: a reader that looks from now on finds the version, and unless ``durable=False`` it is on
    the disk. There are no acknowledgements, and the trainer does not notice readers that come or go. A reader needs the
    URL alone; it may start before or after the trainer, and gets the newest version. A trainer that starts again goes
    on counting. All readers get the same weights: ``params_map``, ``device_map_fn``, ``worker_ids`` of some workers and
    weights per worker are refused.

    Args:
        url: the URL of a folder; each model has a folder of its own in it. A relative path is resolved at once.
        strategy: the format in which weights are returned.
        timeout: seconds for ``connect``; None for no limit.
        bind: whether a worker's model may be bound to the memory that a version was read into.
        keep: how many versions are kept.
        durable: whether each version is flushed to the disk (local file systems).
        options: see ``WeightSyncScheme``. With ``initiator="sender"`` workers install versions as they appear, with
            ``"receiver"`` only when they ``pull``; ``max_staleness`` counts versions that a worker has read: no forward
            waits for one.

    Raises:
        ValueError: ``url`` is empty; ``keep`` is below 1; or see ``WeightSyncScheme``.
    """

    name = "store"
    collectors: ClassVar[tuple[str, ...]] = ("multi_sync", "multi_async", "single", "distributed", "rpc", "ray")

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        strategy: Format = "tensordict",
        timeout: float | None = 60.0,
        bind: bool = True,
        keep: int = 3,
        durable: bool = True,
        **options: Unpack[SchemeOptions],
    ) -> None:
        require_keep(keep)
        super().__init__(strategy, True, timeout=timeout, bind=bind, **options)
        self.url = _absolute(url)
        self.keep = keep
        self.durable = durable
        # Of workers that have this scheme, pickled: the oldest version that they use, and whether they wait for it.
        self._first_version, self._begins_with_weights = 1, True

    @property
    def acknowledges(self) -> bool:
        """See ``WeightSyncScheme``: readers do not answer."""
        return False

    def create_transport(self, worker_idx: int | None = None) -> StoreTransport:
        """Return a transport over the folder of the model ``policy``, for use without a scheme."""
        return StoreTransport(self._folder("policy"), keep=self.keep, durable=self.durable)

    def _folder(self, model_id: str) -> str:
        """Return the URL of a model's folder.

        Raises:
            ValueError: ``model_id`` is no name of a folder.
        """
        name = quote(model_id, safe="")
        if name in ("", ".", ".."):
            raise ValueError(f"model_id is the name of a folder in a store, not {model_id!r}")
        scheme, separator, path = self.url.rpartition("://")
        path, mark, query = path.partition("?") if separator else (path, "", "")
        return f"{scheme}{separator}{path.rstrip('/')}/{name}{mark}{query}"

    def _open_sender(self, model_id: str, source: Source, num_workers: int) -> Sender:
        store = VersionStore(self._folder(model_id), self.keep, self.durable)
        newest = store.open_for_writing()
        channel = StoreSendChannel(store, num_workers, delta_of(self.send_transform))
        sender = Sender(channel, source, num_workers, self.timeout, acknowledges=False, record=self.metrics.record)
        sender.continue_from(newest)
        self._first_version, self._begins_with_weights = newest + 1, source.weights is not None
        self._sender_model_id = model_id
        return sender

    def _make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None, **options: Any) -> Source:
        return super()._make_source(model_id, weights, device_map_fn, one_for_all=SAME_WEIGHTS, **options)

    def _open_receiver(self, model_id: str) -> StoreReceiveChannel:
        store = VersionStore(self._folder(model_id))
        watches = self.initiator == "sender" or self.max_staleness is not None
        return StoreReceiveChannel(
            store, self._first_version, waits=self._begins_with_weights, binds=self.bind, watches=watches
        )

    def shutdown(self) -> None:
        """See ``WeightSyncScheme``."""
        super().shutdown()
        self._first_version, self._begins_with_weights = 1, True


def _absolute(url: str | os.PathLike[str]) -> str:
    """Return a URL as it is, and a path from the root: workers may have other working directories.

    Raises:
        ValueError: it is empty.
    """
    url = os.fspath(url)
    if not url:
        raise ValueError("url is the URL or the path of a folder ('s3://bucket/run', '/shared/run'), not ''")
    path = re.sub(r"^(file|local)://", "", url)
    return path if "://" in path or "::" in path else os.path.abspath(os.path.expanduser(path))


class StoreTransport:
    """Versions of weights in one folder (a ``TransportBackend``), for use without a scheme.

    Args:
        url: the URL of the folder. A relative path is resolved at once.
        keep: how many versions are kept.
        durable: whether each is flushed to the disk.

    Raises:
        NotConnected: it cannot be opened. ValueError: ``url`` is empty, or ``keep`` is below 1.
    """

    def __init__(self, url: str | os.PathLike[str], *, keep: int = 3, durable: bool = True) -> None:
        self._store = VersionStore(_absolute(url), keep, durable)
        self._version = 0
        self._received = ""

    def setup_connection_and_weights_on_sender(self) -> None:
        """Make the folder; go on counting from the newest version in it."""
        self._version = self._store.open_for_writing()

    def send_weights(self, weights: Any) -> None:
        """Store ``weights`` (a module, a TensorDict or a state dict) as the next version."""
        layout, buffer = packed(weights)
        self._version += 1  # a number is not used again: a version may have been stored in spite of an error
        publish(self._store, self._version, layout, buffer)

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Return the newest version, if there is one, applied to ``weights`` and ``model``."""
        return self.receive_weights(0.0, weights=weights, model=model, strategy=strategy)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Return the next version, applied to ``weights`` and ``model``; None if none appeared within ``timeout``.

        Raises:
            WeightSyncError: it cannot be read, or is damaged.
        """
        channel = StoreReceiveChannel(self._store, 1, self._received, binds=False, watches=False)
        try:
            channel.connect(0, deadline_in(timeout))
        except SyncTimeout:
            return None
        update, layout = channel.poll_update(), channel.layout
        assert update is not None and layout is not None, "connect() has read a version"
        applied = apply_received(dict(zip(layout.names, update.views, strict=True)), weights, model, strategy)
        self._received = channel.newest_name  # after an error, the next call receives it again
        return applied
