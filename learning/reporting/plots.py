"""The pictures of a run, from its rows and its summary, and those of a sweep, from its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from rich.filesize import decimal

from learning.progress import WINDOW
from learning.reporting.console import microseconds, number
from learning.reporting.sweep import OVER_RUN, Run
from wsync.metrics import PHASES, percentile

INK, MUTED, BLUE, ORANGE, PALE, RED = "#1f2933", "#7b8794", "#2563eb", "#d97706", "#93c5fd", "#b91c1c"
COLOURS = (BLUE, ORANGE, "#059669", "#db2777", "#7c3aed", "#64748b", "#0891b2", RED)
Rows = Sequence[dict[str, Any]]
_FEW = 5  # runs of a value: with fewer, their interval says nothing
Groups = Mapping[str, Sequence[Run]]


def new_figure(
    width: float, columns: int, title: str, subtitle: str, ratios: Sequence[float] = (1,), height: float = 4.6
) -> tuple[Figure, list[Axes]]:
    """An empty picture in the style of all, `width` by `height` inches; if it is higher than wide, columns are rows."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    shape: Any = {"nrows": columns} if height > width else {"ncols": columns, "width_ratios": ratios}
    axes = figure.subplots(squeeze=False, **shape).ravel()
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes[0].set_title(subtitle, loc="left", fontsize=9.5, color=MUTED)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(MUTED)
        ax.tick_params(colors=INK, labelsize=9)
        ax.xaxis.label.set_color(INK)
        ax.yaxis.label.set_color(INK)
        ax.grid(True, axis="y", color="#e4e7eb", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, list(axes)


def _threshold(ax: Axes, solved_at: float | None) -> None:
    """Draw the return that counts as solved; one far from the data, which the scale is for, is noted at the edge."""
    if solved_at is not None:
        (low, high), said, at = ax.get_ylim(), f"solved at {solved_at:g}", solved_at
        if 2 * low - high <= solved_at <= 2 * high - low:
            ax.axhline(solved_at, color=MUTED, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
        else:
            at, said = (high, f"{said} ↑") if solved_at > high else (low, f"{said} ↓")
            ax.set_ylim(low, high)
        look: Any = {"va": "top" if at == high else "bottom", "color": MUTED, "bbox": {"fc": "w", "ec": "w", "pad": 1}}
        ax.annotate(said, (0.01, at), xycoords=("axes fraction", "data"), fontsize=9, **look)


def _means(rows: Rows) -> tuple[list[tuple[int, float]], bool]:
    """Return ``(index of the row, mean return)`` where 100 episodes have ended; without such rows, all, and True."""
    known = [(i, row) for i, row in enumerate(rows) if row["episode_return_mean_100"] is not None]
    whole = [(i, row) for i, row in known if row["episodes_in_mean"] == WINDOW]
    return [(i, row["episode_return_mean_100"]) for i, row in whole or known], not whole


def _duration_axis(ax: Axes, axis: Axis) -> None:
    """Make an axis of microseconds logarithmic."""
    (ax.set_xscale if axis is ax.xaxis else ax.set_yscale)("log")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: microseconds(value)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_label_text("latency of one update (log scale)")


def _count_axis(ax: Axes) -> None:
    """Write few and short numbers below an axis: 50k."""
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1000 else f"{x / 1000:,g}k"))


def _say_instead(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.6, text, transform=ax.transAxes, ha="center", fontsize=12, color=INK)
    ax.set(xticks=[], yticks=[])


def _legend(figure: Figure, ax: Axes, columns: int = 5) -> None:
    handles = {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if handles:
        where: Any = {"loc": "outside lower left", "ncols": columns}
        figure.legend(list(handles.values()), list(handles), frameon=False, fontsize=9, **where)


def learning_curve(rows: Rows, summary: dict[str, Any]) -> Figure:
    """Draw returns over frames; `rows` are those of ``metrics.jsonl``."""
    of = f"{summary['weight_sync']['scheme']}, seed {summary.get('seed', '–')}: {summary['frames']:,} frames"
    subtitle = f"{of} in {summary['seconds']:.1f} s ({number(summary['frames_per_second'], 0)} frames/s)"
    figure, (ax,) = new_figure(8, 1, f"Learning curve, {summary.get('env', '')}".rstrip(", "), subtitle)
    at, returns = [], [mean for row in rows for mean in row["episode_returns"]]
    for row, (before, after) in zip(rows, pairwise([0, *(row["frames"] for row in rows)]), strict=True):
        at.extend(np.linspace(before, after, len(row["episode_returns"]) + 1)[1:])  # spread over their batch
    ax.scatter(at, returns, s=8, color=PALE, alpha=0.6, linewidths=0, label="one episode", rasterized=True)
    known, few = _means(rows)
    label = "mean of all so far, fewer than 100" if few else "mean of the last 100"
    line = [[rows[i]["frames"] for i, _ in known], [mean for _, mean in known]]
    ax.plot(*line, color=INK, linewidth=2, linestyle="--" if few else "-", label=label)
    _threshold(ax, summary.get("solved_at"))
    for name, colour, label in (("worker_failures", RED, "a worker failed"), ("resumes", MUTED, "resumed")):
        for frames in (two["frames"] for one, two in pairwise(rows) if two[name] > one[name]):
            ax.axvline(frames, color=colour, linewidth=1.2, linestyle=":", label=label)
    ax.set(xlabel="frames (environment steps)", ylabel="return of an episode", xlim=(0, rows[-1]["frames"]))
    _count_axis(ax)
    if not returns:
        _say_instead(ax, "No episode has ended.")
    _legend(figure, ax)
    return figure


def sync_latency(rows: Rows, summary: dict[str, Any]) -> Figure:
    """Draw the latency of each batch's last update, of a resumed run since the resume, and the median of the phases."""
    sync, updates = summary["weight_sync"], _update_latencies(rows, summary)
    workers = summary.get("num_workers", "?")
    subtitle = f"{sync['scheme']}: {sync['updates']:,} updates of {decimal(sync['bytes'])}, workers: {workers}"
    figure, (left, right) = new_figure(10.5, 2, "Weight sync latency", subtitle, (1.5, 1))
    if not updates:
        for ax in (left, right):
            _say_instead(ax, "No update was sent to any worker.")
        return figure
    left.scatter(range(1, len(updates) + 1), updates, s=10, c=BLUE, alpha=0.4, lw=0, rasterized=True, zorder=3)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    for p, style in {50: "-", 95: "--", **({99: ":"} if len(updates) >= 100 else {})}.items():
        value = percentile(updates, p / 100)
        left.axhline(value, color=ORANGE, linewidth=1.3, linestyle=style, label=f"p{p}  {microseconds(value)}")
    left.set_xlabel("update")
    _duration_axis(left, left.yaxis)
    _legend(figure, left)
    bars = {phase: sync["phases_us"].get(phase) or 0.0 for phase in PHASES}
    bars |= {"one plain copy": sync["plain_copy_us"]} if sync.get("plain_copy_us") else {}
    drawn = right.barh(list(bars), list(bars.values()), color=[BLUE if one in PHASES else MUTED for one in bars])
    right.bar_label(drawn, [microseconds(value) for value in bars.values()], padding=4, fontsize=9, color=INK)
    right.invert_yaxis()
    right.set_title("median of each phase", loc="left", fontsize=9.5, color=MUTED)
    right.set_xlabel("µs")
    right.margins(x=0.25)
    right.grid(False)
    return figure


def _update_latencies(rows: Rows, summary: dict[str, Any]) -> list[float]:
    """Return the latency of each update in µs; of a resumed run, those since the resume, as in the summary."""
    before = summary["resumed_from"]["frames"] if "resumed_from" in summary else -1
    return [row["weight_sync"]["latency_us"] for row in rows if row["weight_sync"] and row["frames"] > before]


def sweep_returns(groups: Groups, env: str, solved_at: float | None) -> Figure:
    """Draw each run's mean return over frames and over wall-clock seconds, a colour for each group of runs."""
    subtitle = "a line for each run, from its 100th episode; dashed: fewer than 100, or returns like another setting's"
    figure, axes = new_figure(7, 2, f"Return over frames and time{env}", subtitle, height=8 + 0.1 * len(groups))
    for ax, of_row, label in zip(axes, ("frames", "seconds"), ("frames", "seconds from the first step"), strict=True):
        _count_axis(ax)
        drawn_as: dict[str, str] = {}  # the curves of a group, and its name
        for (name, group), colour in zip(groups.items(), cycle(COLOURS), strict=False):
            drawn = [(run, *_means(run.rows)) for run in group]
            first = drawn_as.setdefault(str([known for _, known, _ in drawn]), name)
            name += "" if first == name else f" (coincides with {first})"
            for i, (run, known, few) in enumerate(one for one in drawn if one[1]):
                line = [[run.rows[n][of_row] for n, _ in known], [mean for _, mean in known]]
                dashed = "--" if few or name != first else "-"
                ax.plot(*line, color=colour, alpha=0.85, linestyle=dashed, label=None if i else name)
        if not ax.lines:
            _say_instead(ax, "No episode has ended.")
        _threshold(ax, solved_at)
        ax.set(xlabel=label, ylabel="mean return of the last 100 episodes")
    _legend(figure, axes[0], 2)
    return figure


def iqm(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the interquartile mean and its 95 % bootstrap interval, https://arxiv.org/abs/2108.13264 (one task)."""

    def middle(samples: Any) -> Any:
        cut = samples.shape[-1] // 4
        return np.sort(samples, axis=-1)[..., cut : samples.shape[-1] - cut].mean(-1)

    own = np.asarray(values)
    low, high = np.percentile(middle(np.random.default_rng(0).choice(own, (2000, own.size))), (2.5, 97.5))
    return float(middle(own)), float(low), float(high)


def sweep_setting(groups: Groups, setting: str, env: str) -> Figure:
    """Draw returns over a setting that is a number; `groups` differ in other settings.

    Above those at the end of each run, below those of the whole run, which also tell slow learning.
    """
    counts = Counter((name, float(run.settings[setting])) for name, group in groups.items() for run in group)
    values, few = sorted({value for _, value in counts}), min(counts.values(), default=0) < _FEW
    told = "median over the seeds; band: lowest to highest" if few else "interquartile mean; band: its 95 % interval"
    subtitle = f"a dot for each complete run; line: {told}"
    figure, axes = new_figure(7, 2, f"Return over {setting}{env}", subtitle, height=8 + 0.1 * len(groups))
    positive = [value for value in values if value > 0]
    for ax, figure_name, of in zip(axes, ("return", OVER_RUN), ("last 100 episodes", "whole run"), strict=True):
        for (label, group), colour in zip(groups.items(), cycle(COLOURS), strict=False):
            points = [(float(run.settings[setting]), run.figures[figure_name]) for run in group]
            ax.scatter(*zip(*points, strict=True), s=14, color=colour)
            at = sorted({x for x, _ in points})
            found = [[y for other, y in points if other == x] for x in at]
            bands = [(np.median(ys), min(ys), max(ys)) if few else iqm(ys) for ys in found]
            middle, low, high = zip(*bands, strict=True)
            ax.plot(at, middle, color=colour, linewidth=2, label=label)
            ax.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        if positive and values[0] >= 0 and values[-1] >= 8 * positive[0]:
            ax.set_xscale("symlog", linthresh=positive[0], base=2)
        ax.set_xticks(values, [f"{value:.3g}" for value in values], rotation=45 if len(values) > 6 else 0)
        ax.set(xlabel=setting, ylabel=f"mean return of the {of}")
        if not values:
            _say_instead(ax, "No run was solved or finished.")
    _legend(figure, axes[0], 2)
    return figure


def sweep_latency(groups: Groups) -> Figure:
    """Draw every update's latency in the complete runs, with median, quartiles, p5 and p95 for each group."""
    updates: dict[str, list[float]] = {}
    for name, group in groups.items():
        if found := [us for run in group if run.complete for us in _update_latencies(run.rows, run.summary)]:
            updates[name] = found
    figure, (ax,) = new_figure(7, 1, "Weight sync latency", "every update; box: quartiles, whiskers: p5 and p95")
    generator = np.random.default_rng(0)
    for y, (values, colour) in enumerate(zip(updates.values(), cycle(COLOURS), strict=False)):
        spread = y + generator.uniform(-0.28, 0.28, len(values))
        ax.scatter(values, spread, s=6, color=colour, alpha=0.3, linewidths=0, rasterized=True)
        ax.boxplot([values], positions=[y], widths=0.5, orientation="horizontal", whis=(5, 95), showfliers=False,
                   medianprops={"color": INK, "linewidth": 1.6}, manage_ticks=False)  # fmt: skip
        median = float(np.median(values))
        ax.annotate(f"p50 {microseconds(median)}", (median, y - 0.31), fontsize=9, color=INK, ha="center")
    if not updates:
        _say_instead(ax, "No run with updates was solved or finished.")
        return figure
    ax.set_yticks(range(len(updates)), [name.replace(" ", "\n") for name in updates])
    ax.set_ylim(len(updates) - 0.4, -0.6)
    _duration_axis(ax, ax.xaxis)
    return figure
