"""The picture of ``scripts/bench_returns.py``: learning curves of several contenders, over their seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from harness.training import Outcome
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from learning.reporting.plots import BLUE, INK, MUTED, ORANGE, new_figure

COLOURS = (BLUE, ORANGE, MUTED, "#0f766e")
POINTS = 200


def last_mean(returns: Sequence[tuple[float, float]], frames: float, last: int) -> float:
    """Return the mean of the `last` returns that ended within `frames`; NaN before the first.

    Args:
        returns: the frames at the end of an episode, and its return, in order.
        frames: those after it do not count.
        last: how many.
    """
    ended = [value for at, value in returns if at <= frames][-last:]
    return float(np.mean(ended)) if ended else float("nan")


def learning_curves(results: Mapping[str, Sequence[Outcome]], title: str, subtitle: str, last: int) -> Figure:
    """Draw the mean over the seeds of each contender, and the range from the lowest to the highest seed.

    Args:
        results: outcomes by contender, each with "returns" (see `last_mean`) and "frames".
        title: the title of the picture.
        subtitle: below it.
        last: a point is the mean of so many episodes.
    """
    figure, (ax,) = new_figure(8, 1, title, subtitle)
    for (name, outcomes), colour in zip(results.items(), COLOURS, strict=False):
        if not outcomes:
            continue
        at = np.linspace(0, max(one["frames"] for one in outcomes), POINTS + 1)[1:]
        curves = np.array([[last_mean(one["returns"], frames, last) for frames in at] for one in outcomes])
        begun = ~np.isnan(curves).any(0)
        at, curves = at[begun], curves[:, begun]
        count = f"{len(outcomes)} seed{'s' if len(outcomes) > 1 else ''}"
        ax.plot(at, curves.mean(0), color=colour, linewidth=2, label=f"{name}, {count}")
        ax.fill_between(at, curves.min(0), curves.max(0), color=colour, alpha=0.18, linewidth=0)
    ax.set_xlabel("frames (environment steps)", color=INK)
    ax.set_ylabel(f"return, mean of {last} episodes", color=INK)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    figure.legend(loc="outside lower left", frameon=False, fontsize=9)
    return figure
