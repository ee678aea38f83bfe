"""The plots of a sweep: returns over frames and time, over a setting that is a number; latency of the weight sync."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from learning.reporting.console import microseconds
from learning.reporting.plots import (
    INK,
    MUTED,
    label_durations,
    means,
    new_figure,
    say_instead,
    threshold,
    update_latencies,
)
from learning.reporting.sweep_runs import common, curves, numeric_setting
from wsync.metrics import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from learning.reporting.sweep_runs import Run

Groups = Mapping[str, Sequence["Run"]]
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#64748b", "#0891b2", "#b91c1c")
_LETTERS = 100  # characters on a line of the plot
_LABEL_WIDTH = 0.17  # of the x axis, for the label of a tick


def returns(groups: Groups) -> Figure:
    """Draw each run's mean return over frames (left) and wall-clock seconds, a colour for each group of runs."""
    runs = [run for group in groups.values() for run in group]
    env, solved_at = common(runs, "env"), common(runs, "solved_at")
    title = "Return over frames and over wall-clock time" + ("" if env is None else f", {env}")
    subtitle = "a line for each run, from its 100th episode; dashed: fewer than 100 episodes ended in it"
    figure, axes = new_figure(11, 2, title, subtitle, (1, 1), height=4.6 + 0.2 * _legend_lines(groups))
    for ax, of_row, label in zip(axes, ("frames", "seconds"), ("frames", "seconds from the first step"), strict=True):
        _draw_returns(ax, groups, of_row)
        if solved_at is not None:
            threshold(ax, solved_at, MUTED)
        ax.set_xlabel(label, color=INK)
        ax.set_ylabel("mean return of the last 100 episodes", color=INK)
        if ax.get_legend_handles_labels()[1]:
            ax.set_xlim(left=0)
        else:
            say_instead(ax, "No episode has ended.")
            ax.set(xticks=[], yticks=[])
    if axes[0].get_legend_handles_labels()[1]:
        _legend(figure, axes[0], groups)
    return figure


def _draw_returns(ax: Axes, groups: Groups, of_row: str) -> None:
    """Draw a line for each run, over an entry of its rows: "frames" or "seconds"."""
    colours = _colours(groups)
    for name, group in groups.items():
        label: str | None = name  # of the first run that is drawn
        for run in group:
            known, few = means(run.rows)
            if known:
                line = [(run.rows[i][of_row], mean) for i, mean in known]
                ax.plot(*zip(*line, strict=True), color=colours[name], linewidth=1.8, alpha=0.85,
                        linestyle="--" if few else "-", label=label)  # fmt: skip
                label = None


def over_setting(groups: Groups) -> Figure:
    """Draw returns over the setting that `numeric_setting` names, a curve for each choice of the others.

    On the left those at the end of each run, on the right those of the whole run, which also tell slow learning.
    """
    runs = [run for group in groups.values() for run in group]
    setting, env, solved_at = numeric_setting(runs), common(runs, "env"), common(runs, "solved_at")
    assert setting is not None
    ended = [run for run in runs if run.complete and None not in (run.final_return, run.return_over_run)]
    subtitle = "a dot for each run"
    if len(groups) < len(runs):
        subtitle += "; line: median over the seeds; band: lowest to highest"
    drawn = curves(ended, setting)
    title = f"Return over {setting}" + ("" if env is None else f", {env}")
    figure, axes = new_figure(11, 2, title, subtitle, (1, 1), height=4.6 + 0.2 * _legend_lines(drawn))
    _draw_curves(axes[0], drawn, lambda run: run.final_return)
    _draw_curves(axes[1], drawn, lambda run: run.return_over_run)
    values = sorted({float(run.settings[setting]) for run in runs})
    right = "early learning counts as well"
    if missing := len(runs) - len(ended):
        right += f"; left out, without a result: {missing}"
    axes[1].set_title(right, loc="left", fontsize=9.5, color=MUTED)
    for ax, name in zip(axes, ("of the last 100 episodes", "averaged over the whole run"), strict=True):
        _space_out(ax, values)
        shown = _apart(ax, values)
        ax.set_xticks(shown, [f"{value:.3g}" for value in shown])
        ax.minorticks_off()
        ax.set_xlabel(setting, color=INK)
        ax.set_ylabel(f"mean return {name}", color=INK)
        if not ended:
            say_instead(ax, "No run was solved or finished.")
    if solved_at is not None:
        threshold(axes[0], solved_at, MUTED)
    if any(drawn):
        _legend(figure, axes[0], drawn)
    return figure


def _draw_curves(ax: Axes, drawn: Mapping[str, Mapping[float, Sequence[Run]]], figure: Callable[[Run], Any]) -> None:
    """Draw a figure of the runs, ``{name of the curve: {x: runs}}``: median, lowest and highest for each x."""
    for (name, points), colour in zip(drawn.items(), cycle(COLOURS), strict=False):
        figures = {x: [figure(run) for run in at] for x, at in points.items()}
        at, low, high = list(figures), [min(ys) for ys in figures.values()], [max(ys) for ys in figures.values()]
        ax.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.plot(at, [float(np.median(ys)) for ys in figures.values()], color=colour, linewidth=2, label=name or None)
        ax.scatter(*zip(*((x, y) for x, ys in figures.items() for y in ys), strict=True), s=14, color=colour)


def _abreast(names: Iterable[str]) -> int:
    """Return how many names fit on a line of the plot, with a piece of line before each."""
    return max(1, _LETTERS // (max(map(len, names), default=0) + 8))


def _legend_lines(names: Collection[str]) -> int:
    return -(-len(names) // _abreast(names))


def _legend(figure: Figure, ax: Axes, names: Collection[str]) -> None:
    handles = ax.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower left", ncols=_abreast(names), frameon=False, fontsize=9)


def _space_out(ax: Axes, values: Sequence[float]) -> None:
    """Give values of several orders of size (0, 1, 2, 4, … or 1e-4, 1e-3, …) a logarithmic scale."""
    positive = [value for value in values if value > 0]
    if values[0] >= 0 and len(positive) > 1 and positive[-1] >= 8 * positive[0]:
        if values[0] == 0:
            ax.set_xscale("symlog", linthresh=positive[0], base=2)
        else:
            ax.set_xscale("log")


def _apart(ax: Axes, values: Sequence[float]) -> list[float]:
    """Return those of the sorted `values` whose labels on the x axis are far enough from the one before."""
    at = ax.transData.transform([(value, 0.0) for value in values])[:, 0] / ax.bbox.width
    shown = [0]
    for i in range(1, len(values)):
        if at[i] - at[shown[-1]] >= _LABEL_WIDTH:
            shown.append(i)
    return [values[i] for i in shown]


def latencies(groups: Groups) -> Figure:
    """Draw every update's latency in the complete runs, with median, quartiles, p5 and p95 for each group."""
    figure, (ax,) = new_figure(9, 1, "Weight sync latency", "every update; box: quartiles, whiskers: p5 and p95")
    shown: list[tuple[str, list[float]]] = []
    for name, group in groups.items():
        if values := [us for run in group if run.complete for us in update_latencies(run.rows, run.summary)]:
            shown.append((name, values))
    generator = np.random.default_rng(0)
    colours = _colours(groups)
    for y, (name, values) in enumerate(shown):
        spread = y + generator.uniform(-0.28, 0.28, len(values))
        ax.scatter(values, spread, s=6, color=colours[name], alpha=0.3, linewidths=0, rasterized=True)
        low, q1, median, q3, high = (percentile(values, share) for share in (0.05, 0.25, 0.5, 0.75, 0.95))
        ax.bxp(
            [{"whislo": low, "q1": q1, "med": median, "q3": q3, "whishi": high}], positions=[y], widths=0.5,
            orientation="horizontal", showfliers=False, medianprops={"color": INK, "linewidth": 1.6},
        )  # fmt: skip
        ax.annotate(f"p50 {microseconds(median)}", (median, y - 0.31), fontsize=9, color=INK, ha="center")
    if not shown:
        say_instead(ax, "No run with updates was solved or finished.")
    ax.set_yticks(range(len(shown)), [name.replace(" ", "\n") for name, _ in shown])
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_xscale("log")
    label_durations(ax.xaxis)
    ax.set_xlabel("latency of one update (log scale)", color=INK)
    return figure


def _colours(groups: Groups) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(groups)}
