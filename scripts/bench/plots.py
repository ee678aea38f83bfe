"""The plot of a benchmark: latency over payload beside a plain copy, and ratios to the peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

Row = dict[str, Any]
_INK, _MUTED = "#1f2933", "#7b8794"
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
_OTHERS = "#7b8794"
_TITLES = {"send": "send, standalone", "update": "a collector's update, between batches"}


def _color(label: str) -> str:
    return _COLORS.get(label, _OTHERS)


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
    figure = Figure(figsize=(5.4 * panels, 4.8 + 0.19 * lines), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
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
    ax.plot(*zip(*plain, strict=True), color=_INK, linestyle="--", marker=".", label="a plain copy")
    if peer is not None:
        ax.plot([], marker="x", color=_MUTED, linestyle=":", linewidth=1, label=f"{peer}, same colour")
    ax.set(xscale="log", yscale="log", xlabel="weights, MiB", ylabel="median, µs (shaded up to p95)")
    ax.set_xticks(sorted(copies), [f"{size:g}" for size in sorted(copies)])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    _dress(ax, f"{_TITLES[kind]}, workers: {workers}")


def _ratios(ax: Axes, rows: Sequence[Row]) -> None:
    names = [f"{row['kind']} {row['label']}, {row['mib']:g} MiB → {row['workers']}" for row in rows]
    ratios = [row["peer"]["ratio_p50"] for row in rows]
    bars = ax.barh(names, ratios, color=[_color(row["label"]) for row in rows])
    ax.bar_label(bars, [f"{ratio:.1f}" for ratio in ratios], padding=3, fontsize=7, color=_INK)
    ax.axvline(1.0, color=_INK, linewidth=1, linestyle="--")
    ax.set(xscale="log", xlabel=f"{rows[0]['peer']['name']}'s p50 over ours")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.invert_yaxis()
    ax.xaxis.set_minor_formatter(NullFormatter())
    _dress(ax, "beside the peer, in alternation")
    ax.tick_params(axis="y", labelsize=7)
    ax.margins(x=0.12)


def _dress(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, color=_INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(_MUTED)
    ax.tick_params(colors=_INK, labelsize=8)
    ax.grid(True, color="#e4e7eb", linewidth=0.8)
    ax.set_axisbelow(True)
