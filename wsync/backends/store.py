"""A store: versions as files, published by atomic rename; a trainer and its readers need not be connected."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any, ClassVar, Literal, Unpack
from urllib.parse import quote

from wsync.deadlines import deadline_in
from wsync.receiver import Receiver
from wsync.registry import SchemeOptions
from wsync.scheme import WeightSyncScheme
from wsync.store.files import MOST_DIFFERENCES, SAME_WEIGHTS, Files, Store, absolute_url
from wsync.store.reader import FileInbox, Reader, in_time
from wsync.store.shards import publish_shards
from wsync.transport import TransportBackend, apply_received
from wsync.update import Outlet, SyncReport, Update
from wsync.weights.layout import packed
from wsync.weights.source import DeviceMap, Source, per_worker
from wsync.weights.strategy import Format


class StoreWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization through files: a shared folder, S3, or whatever else ``fsspec`` reads.

    A finished ``send`` means: a reader that looks from now on finds the version, and it is on the disk. A reader needs
    the URL alone; it may start before or after the trainer. A trainer that starts again goes on counting. All readers
    get the same weights: weights per worker are refused.

    Args:
        url: the URL of a folder; each model has a folder of its own in it. A relative path is resolved at once.
        keep: how many versions can be read: a slow reader may begin with one that is no longer the newest.
        layout: ``"safetensors"``: a version is one file. ``"hf"``: a Hugging Face folder, which ``from_pretrained`` and
            inference engines read.
        model_folder: with ``"hf"``: of a model of the same form. Its other files (config, tokenizer) are copied beside
            each version.
        shard_bytes: with ``"hf"``: of tensors in one file of a folder.
        anchor_every: every how many versions one is written whole. All between are exact differences (``Delta``).
        strategy, options: as in ``WeightSyncScheme``. With ``initiator="sender"`` workers install versions as they
            appear, with ``"receiver"`` only when they ``pull``; ``max_staleness`` counts versions that a worker has
            read: no forward waits for one.

    Raises:
        ValueError: ``url`` is empty; ``keep``, ``shard_bytes`` or ``anchor_every`` is below 1; ``layout`` is neither;
            or see ``WeightSyncScheme``.
        ImportError, at ``init_on_sender``: differences need the package ``zstandard``.
    """

    name = "store"
    collectors: ClassVar[tuple[str, ...]] = ("multi_sync", "multi_async", "single", "distributed", "rpc", "ray")

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: int = 3,
        layout: Literal["safetensors", "hf"] = "safetensors",
        model_folder: str | os.PathLike[str] | None = None,
        shard_bytes: int = 5 << 30,
        anchor_every: int = 1,
        strategy: Format = "tensordict",
        **options: Unpack[SchemeOptions],
    ) -> None:
        if keep < 1 or shard_bytes < 1 or not 1 <= anchor_every <= MOST_DIFFERENCES:
            wrong = f"{keep=}, {shard_bytes=}, {anchor_every=}"
            raise ValueError(f"these are at least 1, and anchor_every at most {MOST_DIFFERENCES}: {wrong}")
        if layout not in ("safetensors", "hf") or (model_folder is not None and layout != "hf"):
            raise ValueError(f"layout is 'safetensors' or 'hf', which alone has a model_folder, not {layout!r}")
        super().__init__(strategy, **options)
        self.url = absolute_url(url)
        self.form = {"keep": keep, "anchor_every": anchor_every, "model_folder": model_folder}  # of what is written
        self.form["shard_bytes"] = shard_bytes if layout == "hf" else 0
        # Of workers that have this scheme, pickled: the oldest version that they use, and whether they wait for it.
        self._first_version, self._begins_with_weights = 1, True

    def send_shards(self, weights: Any = None, *, group: Any = None) -> SyncReport:
        """Publish a version of a model of which ranks have shards (FSDP2, tensor parallelism), or all of it (DDP).

        Every rank of ``group`` (None: the default one) calls it, after ``init_on_sender``. Each writes its part of the
        version; readers are those of ``send``. Rank 0 decides on what is not sharded. ``weights``: as in ``send``.

        WeightSyncError, in all ranks: nothing was published; names those that could not read or write, or have other
        weights. RuntimeError, the group's own: a rank has died, or has not called within the group's timeout: end this
        process. ValueError: not ``layout="hf"`` with ``anchor_every=1``; or there is no process group.
        """
        if not self.form["shard_bytes"] or self.form["anchor_every"] > 1:
            raise ValueError("send_shards() writes whole Hugging Face folders: it needs layout='hf' and anchor_every=1")
        sender, began = self._as_sender("send_shards"), time.monotonic()
        with sender.exclusive():
            sender.version += 1  # not used again: it may be stored in spite of an error
            read = partial(sender.source.first, weights)
            stored = publish_shards(sender.outlet, read, sender.version, group)
            sender.version = sender.sent_version = stored.version
        seconds = time.monotonic() - began
        report = SyncReport(stored.version, stored.whole, seconds, (0.0, 0.0, seconds), sender.outlet.workers)
        self.metrics.record(report)
        return report

    @property
    def acknowledges(self) -> bool:
        return False  # readers do not answer

    @property
    def waits(self) -> bool:
        return True  # a version is stored when it is published

    def create_transport(self, worker_idx: int | None = None) -> StoreTransport:
        """Return a transport over the folder of the model ``policy``, for use without a scheme."""
        return StoreTransport(self._folder("policy"), **self.form)

    def _folder(self, model_id: str) -> str:
        """Return the URL of a model's folder; ValueError: ``model_id`` is no name of a folder."""
        name = quote(model_id, safe="")
        if name in ("", ".", ".."):
            raise ValueError(f"model_id is the name of a folder in a store, not {model_id!r}")
        scheme, separator, path = self.url.rpartition("://")
        return f"{scheme}{separator}{path.rstrip('/')}/{name}"

    def make_outlet(self, model_id: str, num_workers: int) -> Files:
        files = Files(Store(self._folder(model_id)), num_workers, **self.form)
        self._first_version = files.begin() + 1
        return files

    def make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None, **options: Any) -> Source:
        if device_map_fn is not None or len(per_worker(weights) or ()) > 1:
            raise ValueError(f"{SAME_WEIGHTS}: device_map_fn and weights per worker cannot be used")
        persistent = self.form["shard_bytes"] > 0  # engines have no place for other buffers
        return super().make_source(model_id, weights, device_map_fn, persistent=persistent, **options)

    def _begin_sending(self, model_id: str, outlet: Outlet, source: Source, count: int) -> None:
        super()._begin_sending(model_id, outlet, source, count)
        self.continue_from(self._first_version - 1)
        self._begins_with_weights = source.weights is not None

    def make_connection(self, model_id: str, receiver: Receiver) -> FileInbox:
        reader = Reader(Store(self._folder(model_id)), self._first_version)
        watches = self.initiator == "sender" or self.max_staleness is not None
        return FileInbox(reader, receiver, waits=self._begins_with_weights, watches=watches)


class StoreTransport(TransportBackend):
    """Versions of weights in the folder ``url``, for use without a scheme.

    ``form``: ``keep``, ``anchor_every``, ``model_folder`` and ``shard_bytes`` (0 for files without folders), as in
    ``StoreWeightSyncScheme``.
    """

    def __init__(self, url: str | os.PathLike[str], **form: Any) -> None:
        self._store = Store(absolute_url(url))
        self._files = Files(self._store, **form)
        self._sent = self._received = 0  # versions
        self._last: Update | None = None  # that was read

    def setup_connection_and_weights_on_sender(self) -> None:
        self._sent = self._files.begin()

    def send_weights(self, weights: Any) -> None:
        layout, buffer = packed(weights)
        self._files.set_layout(layout)
        self._sent += 1  # a number is not used again: a version may have been stored in spite of an error
        self._files.publish(Update(self._sent, buffer), [0])

    def receive_weights(self, timeout: float | None = None, **into: Any) -> Any | None:
        deadline = deadline_in(timeout)
        reader = Reader(self._store, self._received + 1, self._last)
        try:
            update = in_time(self._store, lambda: reader.wait(deadline), deadline)
        finally:
            self._last = reader.last
        if update is None:
            return None
        received = dict(zip(update.buffer.layout.names, update.views, strict=True))
        applied = apply_received(received, **into)
        self._received = update.version  # after an error, the next call receives it again
        return applied
