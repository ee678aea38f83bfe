"""From rounds to figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from bench.cases import Acting, Case
from bench.conductor import Measured, wrong
from wsync.metrics import percentile
from wsync.types import PHASES


def figures(case: Case, measured: Measured) -> dict[str, Any]:
    """All that is known of one side in a case: plain values, times in µs, memory in MiB."""
    bad = wrong(measured)
    found: dict[str, Any] = {
        "status": "failed" if measured.error else "WRONG" if bad else "ok",
        "rounds": len(measured.rounds),
        "wrong": len(bad),
        "wrong_example": bad[0] if bad else "",
        "error": measured.error,
        "trace": measured.trace,
    }
    if measured.rounds:
        found |= _times(case, measured)
    if measured.acting is not None:
        found["acting"] = _acting(measured.acting)
    found["memory_mib"] = [
        {name: value if name == "who" else round(value / 2**20, 2) for name, value in asdict(one).items()}
        for one in measured.memory
    ]
    return found


def _times(case: Case, measured: Measured) -> dict[str, Any]:
    rounds = measured.rounds
    latency, copy = [one.seconds for one in rounds], median(one.copy for one in rounds)
    phases = {
        phase: micro(median(one.phases.get(phase, 0.0) for one in rounds))
        for phase in PHASES
        if any(one.phases for one in rounds)
    }
    return {
        "p50_us": micro(median(latency)),
        "p95_us": micro(percentile(latency, 0.95)),
        "p99_us": micro(percentile(latency, 0.99)),
        "min_us": micro(min(latency)),
        "gib_s": round(case.mib / 1024 / median(latency), 3),
        "copy_p50_us": micro(copy),
        "over_copy": round(median(latency) / copy, 2),
        "trainer_cpu_us": micro(median(one.trainer_cpu for one in rounds)),
        "workers_cpu_us": micro(median(one.workers_cpu for one in rounds)),
        "phases_us": phases,
    }


def _acting(acting: Acting) -> dict[str, Any]:
    """What the workers felt. ``pause``: how much later the first forward with new weights ended than is usual."""
    usual = median(pauses.usual for pauses in acting.pauses)
    switches = [gap - pauses.usual for pauses in acting.pauses for gap in pauses.switches]
    return {
        "sends": len(acting.seconds),
        "p50_us": micro(median(acting.seconds)),
        "p95_us": micro(percentile(acting.seconds, 0.95)),
        "usual_us": micro(usual),
        "usual_longest_us": micro(max(pauses.usual_longest for pauses in acting.pauses)),
        "pause_p50_us": micro(max(0.0, median(switches))) if switches else None,
        "pause_p95_us": micro(max(0.0, percentile(switches, 0.95))) if switches else None,
        "longest_us": micro(max(pauses.longest for pauses in acting.pauses)),
        "forwards": sum(pauses.forwards for pauses in acting.pauses),
        "mixed": sum(pauses.mixed for pauses in acting.pauses),
        "backwards": sum(pauses.backwards for pauses in acting.pauses),
    }


def median(values: Iterable[float]) -> float:
    """Of at least one value."""
    return statistics.median(values)


def micro(seconds: float) -> float:
    """Microseconds, to a tenth."""
    return round(seconds * 1e6, 1)


def row(case: Case, sides: dict[str, dict[str, Any]], ours: str) -> dict[str, Any]:
    """One line of the results: the case, our figures, and the peers' beside them with ratios."""
    mine = sides[ours]
    found: dict[str, Any] = {**asdict(case), "label": case.label, **mine}
    peers = {name: side for name, side in sides.items() if name != ours}
    for name, side in peers.items():
        found["peer"] = {"name": name, **side}
        if "p50_us" in side and "p50_us" in mine:
            found["peer"]["ratio_p50"] = round(side["p50_us"] / mine["p50_us"], 2)
            found["peer"]["ratio_p95"] = round(side["p95_us"] / mine["p95_us"], 2)
            found["peer"]["our_p95_over_its_p50"] = round(mine["p95_us"] / side["p50_us"], 3)
    return found


def exit_status(rows: Sequence[dict[str, Any]]) -> int:
    """0 if all of ours were measured and none was wrong. A peer that is wrong is its own affair."""
    return int(any(one["status"] != "ok" for one in rows))
