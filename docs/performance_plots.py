"""Draws the plots of docs/performance.md, and nothing else: the same bytes for the same plot.

The only module that needs matplotlib (requirements/dev.txt).  Text stays text, in whatever font the
reader has; the background is white, so that a dark page shows it as well; a figure is as wide as
a phone shows at nearly its full size; colours are Okabe and Ito's, and no difference is one of
colour alone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

WIDTH_INCHES, ROW_INCHES, LINES_INCHES = 5.0, 0.46, 3.0
LEGEND_INCHES = {1: 0.22, 2: 0.15}
"""For each series, by columns."""
LONG_NAME = 22
"""Letters of a series' name: of longer ones the figure is not wide enough for two columns."""
FONT_POINTS = 10.5
INK, FAINT, PAPER = "#1a1a1a", "#8c8c8c", "#ffffff"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "D", "|", "s", "^", "v")
LINES = ("-", "--", "-.", ":")
WIDE = 20
"""How many times the least value the greatest is, from which on an axis is logarithmic."""
FEW_DECADES = 3
"""Up to which a logarithmic axis names more than powers of ten."""
ID = re.compile(r"\b[a-z][0-9a-f]{10}\b")
"""Of an element of matplotlib's."""
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvshm",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": FONT_POINTS,
    "axes.edgecolor": FAINT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
}


class Row(NamedTuple):
    """A line of dots: what is measured, and its points by name, such as p50."""

    label: str
    points: Mapping[str, float]
    ours: bool = True
    """Whether kvshm is part of it: it has another colour then, and its label is bold."""


class Dots(NamedTuple):
    """Rows of dots on one axis; each point's name has a marker of its own."""

    title: str
    unit: str
    rows: Sequence[Row]
    from_zero: bool = True
    """Ratios near 1 would all lie at one place."""

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value."""
        values = [value for row in self.rows for value in row.points.values()]
        return min(values), max(values)


class Curves(NamedTuple):
    """Series of points (x, y), joined by lines; both axes are logarithmic if ``log``."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log: bool = False


Plot = Dots | Curves


def draw(plot: Plot) -> str:
    """Return the plot as SVG."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "svg", **SETTINGS}):
        figure = _dots(plot) if isinstance(plot, Dots) else _curves(plot)
        written = io.StringIO()
        told = {"Date": None, "Creator": None, "Title": plot.title}
        figure.savefig(written, format="svg", metadata=told)
    # Trailing spaces differ between versions of matplotlib, and git complains of them.
    return "\n".join(line.rstrip() for line in _numbered(written.getvalue()).splitlines()) + "\n"


def _numbered(svg: str) -> str:
    """Number the ids in their order.  matplotlib's are hashes of coordinates, whose last digits
    depend on the CPU."""
    ids: dict[str, str] = {}
    return ID.sub(lambda found: ids.setdefault(found[0], f"{found[0][0]}{len(ids)}"), svg)


def _figure(title: str, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, fontsize=FONT_POINTS + 1, fontweight="bold", x=0.02, ha="left")
    axes.grid(axis="x", color=FAINT, alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _dots(plot: Dots) -> Figure:
    """Each row's label stands above its dots: beside them it would take half of a phone."""
    figure, axes = _figure(plot.title, 1.2 + ROW_INCHES * len(plot.rows))
    names = list(dict.fromkeys(name for row in plot.rows for name in row.points))
    markers = dict(zip(names, MARKERS, strict=False))
    for place, row in enumerate(plot.rows):
        colour = COLOURS[0] if row.ours else COLOURS[1]
        values = list(row.points.values())
        axes.plot([min(values), max(values)], [place] * 2, color=colour, alpha=0.45, linewidth=2)
        for name, value in row.points.items():
            size = 11 if markers[name] == "|" else 6
            axes.plot([value], [place], markers[name], color=colour, markersize=size, mew=2)
        weight, beside = "bold" if row.ours else "normal", axes.get_yaxis_transform()
        axes.text(0.01, place - 0.27, row.label, weight=weight, va="bottom", transform=beside)
    for name, marker in markers.items():
        axes.plot([], [], marker, color=INK, label=name, mew=2)
    least, greatest = plot.ends
    if logarithmic := 0 < WIDE * least < greatest:
        _log(axes.xaxis, math.log10(greatest / least))
    else:
        margin = (greatest - least) / 20
        left = min(0, least - margin) if plot.from_zero else least - margin
        axes.set_xlim(left, 1.06 * greatest or 1 if plot.from_zero else greatest + margin)
        axes.xaxis.set_major_formatter(_written)
    axes.set_xlabel(f"{plot.unit}, logarithmic" if logarithmic else plot.unit)
    axes.set_yticks([])
    axes.set_ylim(len(plot.rows) - 0.5, -0.9)
    figure.legend(loc="outside lower right", ncols=4, frameon=False)
    return figure


def _log(axis: Any, decades: float) -> None:
    axis._set_axes_scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades <= FEW_DECADES else (1,)))
    axis.set_major_formatter(_written)
    axis.set_minor_formatter(NullFormatter())


def _written(value: float, _: object) -> str:
    return f"{value:,.6g}"


def _curves(plot: Curves) -> Figure:
    columns = 1 if max(map(len, plot.series)) > LONG_NAME else 2
    figure, axes = _figure(plot.title, LINES_INCHES + LEGEND_INCHES[columns] * len(plot.series))
    for number, (name, points) in enumerate(plot.series.items()):
        x, y = zip(*points, strict=True)
        axes.plot(
            x,
            y,
            LINES[number % len(LINES)],
            marker=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            label=name,
        )
    axes.grid(axis="y", color=FAINT, alpha=0.3, linewidth=0.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_written)
        if plot.log:
            low, high = axis.get_data_interval()
            _log(axis, math.log10(high / low))
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    return figure
