"""The plot of a benchmark: latency over payload beside a plain copy, and ratios to the peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from learning.reporting.plots import INK, MUTED, new_figure

Row = dict[str, Any]
_COLORS = {
    "shared_mem, published": "#1d4ed8",
    "shared_mem, installed": "#60a5fa",
    "multiprocess": "#d97706",
    "distributed": "#059669",
    "distributed, gloo": "#6ee7b7",
    "rpc": "#7c3aed",
    "rpc, gloo": "#c4b5fd",
    "ray": "#dc2626",
    "ray, gloo": "#fca5a5",
}
_TITLES = {"send": "send, standalone", "update": "a collector's update, between batches"}


def _color(label: str) -> str:
    return _COLORS.get(label, MUTED)


def picture(rows: Sequence[Row], path: Path) -> None:
    """Write the PNG at ``path``; without any measured case, none."""
    measured = [row for row in rows if "p50_us" in row]
    kinds = [kind for kind in _TITLES if any(row["kind"] == kind for row in measured)]
    compared = [row for row in measured if "ratio_p50" in row.get("peer", {})]
    if not kinds:
        return
    panels = len(kinds) + bool(compared)
    abreast = 2 * panels  # entries of the legend, which stands below the axes
    lines = -(-(len({row["label"] for row in measured}) + 2) // abreast)  # with the plain copy and the peer
    figure, axes = new_figure(5.4 * panels, panels, "Weight sync", "", (1,) * panels, height=5.2 + 0.19 * lines)
    for ax, kind in zip(axes, kinds, strict=False):
        _latency(ax, kind, [row for row in measured if row["kind"] == kind])
    if compared:
        _ratios(axes[-1], compared)
    drawn = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower left", ncols=abreast, frameon=False, fontsize=8)
    figure.savefig(path)


def _latency(ax: Axes, kind: str, rows: Sequence[Row]) -> None:
    workers = max(row["workers"] for row in rows)
    rows = [row for row in rows if row["workers"] == workers]
    copies: dict[float, list[float]] = {}
    peer = None
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = sorted((row for row in rows if row["label"] == label), key=lambda row: row["mib"])
        sizes = [row["mib"] for row in mine]
        for row in mine:
            copies.setdefault(row["mib"], []).append(row["copy_p50_us"])
        middle, tail, color = [row["p50_us"] for row in mine], [row["p95_us"] for row in mine], _color(label)
        ax.plot(sizes, middle, marker="o", markersize=4, color=color, label=label)
        ax.fill_between(sizes, middle, tail, color=color, alpha=0.12, linewidth=0)
        beside = [(row["mib"], row["peer"]["p50_us"]) for row in mine if "p50_us" in row.get("peer", {})]
        if beside:
            ax.plot(*zip(*beside, strict=True), marker="x", color=color, linestyle=":", linewidth=1)
            peer = mine[0]["peer"]["name"]
    plain = sorted((size, sorted(times)[len(times) // 2]) for size, times in copies.items())
    ax.plot(*zip(*plain, strict=True), color=INK, linestyle="--", marker=".", label="a plain copy")
    if peer is not None:
        ax.plot([], marker="x", color=MUTED, linestyle=":", linewidth=1, label=f"{peer}, same colour")
    ax.set(xscale="log", yscale="log", xlabel="weights, MiB", ylabel="median, µs (shaded up to p95)")
    ax.set_xticks(sorted(copies), [f"{size:g}" for size in sorted(copies)])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    ax.set_title(f"{_TITLES[kind]}, workers: {workers}", loc="left", fontsize=10, color=INK)


def _ratios(ax: Axes, rows: Sequence[Row]) -> None:
    names = [f"{row['kind']} {row['label']}, {row['mib']:g} MiB → {row['workers']}" for row in rows]
    ratios = [row["peer"]["ratio_p50"] for row in rows]
    bars = ax.barh(names, ratios, color=[_color(row["label"]) for row in rows])
    ax.bar_label(bars, [f"{ratio:.1f}" for ratio in ratios], padding=3, fontsize=7, color=INK)
    ax.axvline(1.0, color=INK, linewidth=1, linestyle="--")
    ax.set(xscale="log", xlabel=f"{rows[0]['peer']['name']}'s median, divided by wsync's")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.invert_yaxis()
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_title("measured in turn; above 1, wsync is faster", loc="left", fontsize=10, color=INK)
    ax.tick_params(axis="y", labelsize=7)
    ax.margins(x=0.12)
