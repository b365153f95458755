"""What a view of a benchmark's results is, and the one that most have: several distributions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from performance_plots import Dots, Plot, Row

Line = Mapping[str, Any]
Lines = Sequence[Line]
Spread = Mapping[str, float]
"""As benchmarks/measurement.py tells many values."""
PERCENTILES = ("p50", "p99")


@dataclass(frozen=True)
class View:
    """Of one benchmark's results."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    plots: Mapping[str, Plot] = field(default_factory=dict)
    """By the name that the file has behind the section's."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """For the prose, beside ``lines`` and ``line``, the last one of them."""
    failed: bool = False
    """Whether an arm has failed, so that the prose may speak of what is not there."""


def number(value: float) -> str:
    """Write a measured value with three digits that count, or all that are before the point."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{value:#.3g}"


def spreads(of: Mapping[str, Spread], unit: str, title: str, ours: Iterable[str] = ()) -> View:
    """Return a view of several distributions in one unit: a row each.  ``ours``: those with kvshm,
    all of them if it is empty."""
    head = ("", f"p50, {unit}", f"p99, {unit}", "least to greatest", "n")
    rows = [
        (
            label,
            number(one["p50"]),
            number(one["p99"]),
            f"{number(one['min'])} to {number(one['max'])}" if "min" in one else "",
            f"{one.get('n', 0):,}",
        )
        for label, one in of.items()
    ]
    chosen = {*ours} or {*of}
    dots = [Row(k, {p: one[p] for p in PERCENTILES}, k in chosen) for k, one in of.items()]
    return View(head, rows, {"": Dots(title, unit, dots)})
