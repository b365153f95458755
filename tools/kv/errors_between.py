"""How far two arrays of numbers are apart.  Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy


class Distance:
    """Sums over pairs of numbers.  A NaN or infinity that both sides have counts as equal; any
    other makes the errors infinite."""

    def __init__(self) -> None:
        self.count = 0
        self.different_bytes = 0
        self.not_finite = 0
        self._finite = 0
        self._largest = self._sum = self._squares = 0.0
        self._signal = self._other = self._product = 0.0

    def add(self, a: Any, b: Any, dtype: str) -> None:
        """Add arrays of equally many bytes, read as numbers of ``dtype``."""
        self.different_bytes += int(numpy.count_nonzero(a != b))
        if dtype == "uint8":
            self.count += a.size
            return
        x, y = as_numbers(a, dtype), as_numbers(b, dtype)
        self.count += x.size
        finite = numpy.isfinite(x) & numpy.isfinite(y)
        with numpy.errstate(invalid="ignore"):
            same = (x == y) | (numpy.isnan(x) & numpy.isnan(y))
        self.not_finite += int(numpy.count_nonzero(~finite & ~same))
        x, y = x[finite], y[finite]
        error = numpy.abs(x - y)
        self._finite += x.size
        if x.size:
            self._largest = max(self._largest, float(error.max()))
        self._sum += float(error.sum())
        self._squares += float(error @ error)
        self._signal += float(x @ x)
        self._other += float(y @ y)
        self._product += float(x @ y)

    @property
    def max_abs(self) -> float:
        return math.inf if self.not_finite else self._largest

    @property
    def mean_abs(self) -> float:
        return math.inf if self.not_finite else self._sum / max(1, self._finite)

    @property
    def rmse(self) -> float:
        return math.inf if self.not_finite else math.sqrt(self._squares / max(1, self._finite))

    @property
    def snr_db(self) -> float:
        if self.not_finite:
            return -math.inf
        if not self._squares:
            return math.inf
        return 10 * math.log10(self._signal / self._squares) if self._signal else -math.inf

    @property
    def cosine(self) -> float:
        """NaN if one side is zero or not finite."""
        if self.not_finite:
            return math.nan
        if not self._signal and not self._other:
            return 1.0
        size = math.sqrt(self._signal) * math.sqrt(self._other)
        return self._product / size if size else math.nan


def as_numbers(raw: Any, dtype: str) -> Any:
    """Read bytes as numbers of ``dtype``, each as a float64."""
    flat = numpy.ascontiguousarray(raw).reshape(-1)
    if dtype == "bfloat16":  # the upper half of a float32
        narrow = (flat.view("<u2").astype("<u4") << 16).view("<f4")
    else:
        narrow = flat.view({"float16": "<f2", "float32": "<f4"}[dtype])
    with numpy.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return narrow.astype(numpy.float64)
