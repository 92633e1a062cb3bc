"""A result as a picture: bars a pattern, lines over threads and over free extents. matplotlib is imported on use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["is_possible", "plot"]

_OURS, _OTHERS = "#0072B2", "#999999"
_COLOURS = (
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8C564B",
    "#666666",
    "#BCBD22",
    "#9467BD",
    "#17BECF",
)
_COLUMNS = 2
_LINES_HIGH = 3.4  # inches
_OVER = {"threads": "threads", "freelist": "pieces"}  # kinds of many values: over which parameter

_Row = Mapping[str, Any]


def is_possible() -> bool:
    """Say whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw every figure of a result, on logarithmic axes.

    Raises
    ------
    OSError, ValueError
        The file cannot be written, or its suffix is no format of matplotlib's.
    """
    from matplotlib.figure import Figure  # no window system and no global state

    panels = list(_panels(result["rows"]))
    pairs = [panels[i : i + _COLUMNS] for i in range(0, len(panels), _COLUMNS)] or [[]]
    heights = [max((high for _, high, _ in pair), default=1.0) for pair in pairs]
    figure = Figure(figsize=(15, sum(heights) + 0.5), layout="constrained")
    grid = figure.subplots(len(pairs), _COLUMNS, squeeze=False, height_ratios=heights)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, _, draw) in zip(grid.flat, panels, strict=False):
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
    machine = result["machine"]
    figure.suptitle(
        f"streampool {result['versions'].get('streampool', '')} on {machine['gpu'] or machine['device']}, "
        f"{result['date'][:10]}: ns, less is better",
        fontsize=11,
    )
    figure.savefig(path, dpi=100)


def _panels(rows: list[_Row]) -> Iterator[tuple[str, float, Callable[[Any], None]]]:
    """Give the title, the height in inches and the drawing of each panel."""
    groups: dict[tuple[str, str], list[_Row]] = {}
    for row in rows:
        if row["kind"] == "freelist":
            title = f"Among free extents, {row['parameters']['order']} order: {row['parameters']['part']}"
        else:
            title = "What ordering costs" if row["kind"] == "ordering" else row["pattern"]
        groups.setdefault((row["kind"], title), []).append(row)
    for (kind, title), mine in groups.items():
        if kind in _OVER:
            yield title, _LINES_HIGH, partial(_lines, rows=mine, over=_OVER[kind])
        else:
            yield title, 0.9 + 0.26 * len(mine), partial(_bars, rows=mine)


def _bars(axes: Any, rows: list[_Row]) -> None:
    ordered = sorted(rows, key=lambda row: -row["median"])
    names = [row["pattern"] if row["kind"] == "ordering" else row["label"] for row in ordered]
    colours = [_OURS if row["peer"].startswith("streampool") else _OTHERS for row in ordered]
    bars = axes.barh(range(len(names)), [row["median"] for row in ordered], color=colours)
    axes.bar_label(bars, [_words(row) for row in ordered], padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.35)


def _words(row: _Row) -> str:
    text = f"{row['median']:,.0f} ns"
    if row["ratio"] is not None:
        text += f", {row['ratio']:.2f} ×"  # noqa: RUF001
    if "held_ratio" in row["extra"]:
        text += f", holds {row['extra']['held_ratio']:.3f} × live"  # noqa: RUF001
    return text


def _lines(axes: Any, rows: list[_Row], over: str) -> None:
    others = iter(_COLOURS * len(rows))
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = sorted((row for row in rows if row["label"] == label), key=lambda row: row["parameters"][over])
        ours = mine[0]["peer"] == "streampool"
        axes.plot(
            [row["parameters"][over] for row in mine],
            [row["median"] for row in mine],
            marker="o",
            markersize=4,
            linewidth=2.5 if ours else 1.2,
            color=_OURS if ours else next(others),
            label=label,
            zorder=3 if ours else 2,
        )
    places = sorted({row["parameters"][over] for row in rows})
    axes.set_xscale("log", base=2 if over == "threads" else 10)
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{n:,}" for n in places])
    axes.minorticks_off()
    axes.set_xlabel({"threads": "threads", "pieces": "free extents"}[over], fontsize=8)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
