"""The two plots of a run: returns over frames, and the latency of each weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from learning.progress import WINDOW
from learning.reporting.console import microseconds, number, size
from wsync.metrics import percentile
from wsync.types import PHASES

INK, MUTED, BLUE, ORANGE, PALE, RED = "#1f2933", "#7b8794", "#2563eb", "#d97706", "#93c5fd", "#b91c1c"
Rows = Sequence[dict[str, Any]]


def new_figure(
    width: float, columns: int, title: str, subtitle: str, ratios: Sequence[float] = (1,), height: float = 4.6
) -> tuple[Figure, list[Axes]]:
    """An empty picture in the style of all of them, `width` by `height` inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, width_ratios=ratios, squeeze=False)[0]
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes[0].set_title(subtitle, loc="left", fontsize=9.5, color=MUTED)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(MUTED)
        ax.tick_params(colors=INK, labelsize=9)
        ax.grid(True, axis="y", color="#e4e7eb", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, list(axes)


def threshold(ax: Axes, solved_at: float, colour: str = ORANGE) -> None:
    """Draw the return that counts as solved, its name beside the axes; only the name if it is far above the curves."""
    low, high = ax.get_ylim()
    far = solved_at > high + 3 * (high - low)
    if not far:
        ax.axhline(solved_at, color=colour, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
    text, at = f"solved\nat {solved_at:g}" + (" ↑" if far else ""), 1 if far else solved_at
    ax.annotate(
        text, (1, at), xycoords=("axes fraction", "axes fraction" if far else "data"), va="top" if far else "center",
        xytext=(5, 0), textcoords="offset points", color=colour, fontsize=9, annotation_clip=False,
    )  # fmt: skip


def means(rows: Rows) -> tuple[list[tuple[int, float]], bool]:
    """Return ``(index of the row, mean return)`` where 100 episodes have ended; without such rows, all, and True."""
    known = [(i, row) for i, row in enumerate(rows) if row["episode_return_mean_100"] is not None]
    whole = [(i, row) for i, row in known if row["episodes_in_mean"] == WINDOW]
    return [(i, row["episode_return_mean_100"]) for i, row in whole or known], not whole


def label_durations(axis: Axis) -> None:
    """Label a logarithmic axis of microseconds."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: microseconds(value)))
    axis.set_minor_formatter(NullFormatter())


def say_instead(ax: Axes, text: str) -> None:
    """Say why there is nothing to see."""
    ax.text(0.5, 0.6, text, transform=ax.transAxes, ha="center", fontsize=12, color=INK)


def learning_curve(rows: Rows, summary: dict[str, Any]) -> Figure:
    """Draw returns over frames; `rows` are those of ``metrics.jsonl``."""
    subtitle = (
        f"{summary['weight_sync']['scheme']}, seed {summary.get('seed', '–')}: {summary['frames']:,} frames in "
        f"{summary['seconds']:.1f} s ({number(summary['frames_per_second'], 0)} frames/s)"
    )
    figure, (ax,) = new_figure(8, 1, f"Learning curve, {summary.get('env', '')}".rstrip(", "), subtitle)
    at, returns, before = [], [], 0
    for row in rows:
        ended = row["episode_returns"]
        at.extend(np.linspace(before, row["frames"], len(ended) + 1)[1:])  # spread over their batch
        returns.extend(ended)
        before = row["frames"]
    ax.scatter(at, returns, s=8, color=PALE, alpha=0.6, linewidths=0, label="one episode", rasterized=True)
    known, few = means(rows)
    if known:
        line = [(rows[i]["frames"], mean) for i, mean in known]
        outline = withStroke(linewidth=4, foreground="white")
        ax.plot(
            *zip(*line, strict=True), color=INK, linewidth=2, linestyle="--" if few else "-", path_effects=[outline],
            label="mean of all so far, fewer than 100" if few else "mean of the last 100",
        )  # fmt: skip
    if summary.get("solved_at") is not None:
        threshold(ax, summary["solved_at"])
    _marks(ax, rows)
    ax.set_xlabel("frames (environment steps)", color=INK)
    ax.set_ylabel("return of an episode", color=INK)
    ax.set_xlim(left=0, right=None if returns else rows[-1]["frames"])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    if returns:
        figure.legend(loc="outside lower left", ncols=5, frameon=False, fontsize=9, markerscale=2)
    else:
        say_instead(ax, "No episode has ended.")
        ax.set_yticks([])  # of a scale that nothing has set
    return figure


def _marks(ax: Axes, rows: Rows) -> None:
    """Mark where workers have failed, at the top, and where the run was resumed."""

    def risen(name: str) -> list[int]:
        counts = [0, *(row.get(name, 0) for row in rows)]
        return [row["frames"] for row, (one, two) in zip(rows, pairwise(counts), strict=True) if two > one]

    if failed := risen("worker_failures"):
        ax.plot(failed, [0.985] * len(failed), transform=ax.get_xaxis_transform(), marker="v", color=RED, markersize=6,
                linestyle="none", clip_on=False, label="a worker failed")  # fmt: skip
    for i, frames in enumerate(risen("resumes")):
        ax.axvline(frames, color=MUTED, linewidth=1.2, linestyle=":", label=None if i else "resumed")


def sync_latency(rows: Rows, summary: dict[str, Any]) -> Figure:
    """Draw the latency of each batch's last update, of a resumed run since the resume, and the median of the phases."""
    sync = summary["weight_sync"]
    updates = update_latencies(rows, summary)
    workers = summary.get("num_workers", "?")
    subtitle = f"{sync['scheme']}: {sync['updates']:,} updates of {size(sync['bytes'])}, workers: {workers}"
    figure, (left, right) = new_figure(10.5, 2, "Weight sync latency", subtitle, (1.5, 1))
    if updates:
        _latencies(left, updates)
        _phases(right, sync)
    else:
        for ax in (left, right):
            ax.set_axis_off()
        left.text(0, 0.5, "No update was sent to any worker.", fontsize=12, color=INK)
    return figure


def update_latencies(rows: Rows, summary: dict[str, Any]) -> list[float]:
    """Return the latency of each update in µs; of a resumed run, those since the resume, as in the summary."""
    before = summary["resumed_from"]["frames"] if "resumed_from" in summary else -1
    return [row["weight_sync"]["latency_us"] for row in rows if row["weight_sync"] and row["frames"] > before]


def _latencies(ax: Axes, latencies: Sequence[float]) -> None:
    percentiles = {f"p{p}": percentile(latencies, p / 100) for p in (50, 95, 99)}
    ax.scatter(range(1, len(latencies) + 1), latencies, s=10, color=BLUE, alpha=0.4, linewidths=0, rasterized=True)
    ax.set_yscale("log")
    low, high = min(latencies) / 1.2, max(latencies) * 1.2
    ax.set_ylim(low, high)
    label_y = 0.0
    for (name, value), style in zip(percentiles.items(), ("-", "--", ":"), strict=True):
        ax.axhline(value, color=ORANGE, linewidth=1.3, linestyle=style)
        label_y = max(np.log(value / low) / np.log(high / low), label_y)  # close percentiles keep legible labels
        ax.text(
            1.01,
            label_y,
            f"{name}  {microseconds(value)}",
            transform=ax.transAxes,
            va="center",
            color=ORANGE,
            fontsize=9,
        )
        label_y += 0.05
    label_durations(ax.yaxis)
    ax.set_xlabel("update", color=INK)
    ax.set_ylabel("latency of one update (log scale)", color=INK)


def _phases(ax: Axes, sync: dict[str, Any]) -> None:
    bars = [(phase, sync["phases_us"].get(phase) or 0.0, BLUE) for phase in PHASES]
    if sync.get("plain_copy_us"):
        bars.append(("one plain copy", sync["plain_copy_us"], MUTED))
    names, values, colours = zip(*reversed(bars), strict=True)
    ax.barh(names, values, color=colours, height=0.62)
    for i, value in enumerate(values):
        ax.annotate(microseconds(value), (value, i), xytext=(4, -3), textcoords="offset points", fontsize=9, color=INK)
    ax.set_title("median of each phase", loc="left", fontsize=9.5, color=MUTED)
    ax.set_xlabel("µs", color=INK)
    ax.set_xlim(0, max(max(values), 1e-9) * 1.25)
    ax.grid(False)
    ax.tick_params(axis="y", length=0)
