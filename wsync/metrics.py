"""What updates cost: phase by phase, in percentiles, beside a plain copy of the bytes. And which worker has which."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec
import torch

from wsync.errors import missing_extra
from wsync.update import PHASES, SyncReport

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_KEPT = 10_000  # of the newest updates, for percentiles
senders = WeakValueDictionary[int, Any]()  # the schemes of this process that send, by id
_COPIES, _LARGEST_COPY = 15, 64 << 20  # of the plain copy: how many are timed, bytes


def ledger() -> list[dict[str, Any]]:
    """Return the rows of ``WeightSyncScheme.ledger`` of all schemes that send from this process."""
    schemes = [reference() for reference in senders.valuerefs()]
    return [row for one in schemes if one is not None and one.is_sender for row in one.ledger()]


def serve_metrics(port: int, host: str = "127.0.0.1") -> WSGIServer:
    """Serve over HTTP which versions the workers of all schemes of this process have; to anybody, without a key.

    ``/metrics`` is for Prometheus; ``/ledger`` has the rows of ``WeightSyncScheme.ledger`` as JSON. Returns the server,
    which runs in a thread: ``server_port``, ``shutdown()``. ImportError: ``prometheus-client`` is missing.
    """
    try:
        import prometheus_client as prometheus  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise missing_extra(error, "metrics") from error

    def figures() -> bytes:
        registry, labels = prometheus.CollectorRegistry(), ("model", "scheme", "worker")
        rows = [{**row, "alive": row["state"] == "alive"} for row in ledger()]
        for name in ("alive", "sent", "installed", "behind"):
            gauge = prometheus.Gauge(f"wsync_{name}", "see docs/seen.md", labels, registry=registry)
            for row in rows:
                if row[name] is not None:
                    gauge.labels(*(row[label] for label in labels)).set(row[name])
        return prometheus.generate_latest(registry)

    def app(request: dict[str, Any], start: Callable[..., object]) -> list[bytes]:
        as_json = request["PATH_INFO"] == "/ledger"
        start("200 OK", [("Content-Type", "application/json" if as_json else "text/plain; version=0.0.4")])
        return [msgspec.json.encode(ledger()) if as_json else figures()]

    server, _ = prometheus.start_http_server(port, host)
    server.set_app(app)
    return server


_tracer: Any = None  # what ``trace_updates`` has made


def trace_updates(provider: Any = None) -> None:
    """Have each update that is finished from now on, of all schemes of this process, be an OpenTelemetry span.

    It is named ``wsync.update``, and has the scheme, version, bytes, workers, and the seconds of each phase.
    ``provider``: a ``TracerProvider``; by default the global one. ImportError: ``opentelemetry-api`` is missing.
    """
    global _tracer
    try:
        from opentelemetry import trace  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise missing_extra(error, "metrics") from error
    _tracer = trace.get_tracer("wsync", tracer_provider=provider)


def _trace(scheme: str, report: SyncReport) -> None:
    end, workers = time.time_ns(), [*report.workers]
    seconds = {f"wsync.{phase}_seconds": value for phase, value in report.phases.items()}
    own = {"wsync.scheme": scheme, "wsync.version": report.version, "wsync.bytes": report.bytes}
    attributes = {**own, "wsync.workers": workers, **seconds}
    span = _tracer.start_span("wsync.update", start_time=end - int(report.seconds * 1e9), attributes=attributes)
    span.end(end)


class SyncMetrics:
    """The reports of one scheme's updates: how many ``updates``, and the ``last``. Printed, it is one line."""

    def __init__(self, scheme: str) -> None:
        self.scheme, self.updates, self.seconds = scheme, 0, 0.0  # the seconds of all updates
        self.last: SyncReport | None = None
        self._began = self._observed = self._ages = 0.0
        self._reports = deque[SyncReport](maxlen=_KEPT)

    def record(self, report: SyncReport) -> None:
        """Take in one update."""
        self._began = self._began or time.monotonic() - report.seconds
        self.updates += 1
        self.seconds += report.seconds
        self._reports.append(report)
        self.last = report  # after it is kept: another thread may call ``summary``
        if _tracer is not None:
            _trace(self.scheme, report)

    def observe(self, versions: torch.Tensor | Sequence[int]) -> None:
        """Take in which versions acted in frames that are used now, for ``age``; below 0: none. Collectors do it."""
        acted = torch.as_tensor(versions)
        acted = acted[acted >= 0]
        self._observed += acted.numel()
        self._ages += float(((self.last.version if self.last else 0) - acted).clamp(min=0).sum())

    def summary(self) -> dict[str, Any]:
        """Everything as plain values; microseconds, bytes; percentiles and medians of the newest 10,000 updates.

        ``seconds`` are those of all updates, ``share`` is their part of the time since the first one began, and ``age``
        the mean number of versions by which observed frames were behind the newest one.
        """
        result: dict[str, Any] = {"scheme": self.scheme, "updates": self.updates, "version": 0, "bytes": 0}
        if self.last is None:
            return result
        reports = self._reports.copy()  # at once: another thread may append
        latencies, phases = [one.seconds * 1e6 for one in reports], [one.phases for one in reports]
        p50, p95, p99 = (percentile(latencies, share) for share in (0.5, 0.95, 0.99))
        copy = plain_copy_us(self.last.bytes) if self.last.bytes else 0.0
        return result | {
            "version": self.last.version,
            "bytes": self.last.bytes,
            "seconds": self.seconds,
            "share": self.seconds / max(time.monotonic() - self._began, 1e-9),
            "age": self._ages / self._observed if self._observed else None,
            "latency_us": {"p50": p50, "p95": p95, "p99": p99, "max": max(latencies)},
            "phases_us": {phase: statistics.median(one[phase] for one in phases) * 1e6 for phase in PHASES},
            "plain_copy_us": copy,
            "over_plain_copy": p50 / copy if copy else 0.0,
        }

    def __repr__(self) -> str:
        figures = self.summary()
        if self.last is None:
            return f"{self.scheme}: no updates"
        p50, p95 = (f"{figures['latency_us'][name]:,.0f} us" for name in ("p50", "p95"))
        age = "" if figures["age"] is None else f", data {figures['age']:.1f} versions old"
        took = f"{self.seconds:.3g} s in all ({figures['share']:.1%} of the time), p50 {p50}, p95 {p95}"
        return f"{self.scheme}: {self.updates:,} updates of {self.last.bytes:,} bytes, {took}{age}"


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest of ``values`` that at least ``fraction`` of them do not exceed (the nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def plain_copy_us(nbytes: int) -> float:
    """Median microseconds of a copy of ``nbytes`` bytes by one thread, here and now; beyond 64 MiB it is scaled."""
    copied = min(nbytes, _LARGEST_COPY)
    source = torch.ones(copied, dtype=torch.uint8).numpy()
    destination = source.copy()  # and so in memory that has been written before
    times: list[float] = []
    for _ in range(1 + _COPIES):  # the first one is not counted
        started = time.perf_counter()
        destination[:] = source
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times[1:]) * nbytes / copied
