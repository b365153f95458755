"""``kvshm kv compare``: how much the blocks of two files differ, region by region."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshm._base.fingerprint import differences

from ..output import aligned, show
from .block_file import BlockFile, BlockFileError, Description
from .errors_between import Distance
from .number_formats import DTYPES, dtype_of

EQUAL, DIFFERENT, NOT_COMPARED = range(3)
CHUNK_BYTES = 16 << 20
_COLUMNS = ("tensor", "max", "mean", "RMSE", "SNR dB", "cosine", "not finite", "bytes that differ")


@dataclass(frozen=True)
class How:
    dtype: str | None = None
    tolerance: float | None = None
    """None: all bytes have to be equal."""
    any_fingerprint: bool = False


@dataclass
class Comparison:
    dtype: str
    blocks: int
    only: tuple[int, int]
    """Blocks that only the first, only the second file has."""
    tensors: dict[str, Distance]

    def equal(self, tolerance: float | None) -> bool:
        if tolerance is None or self.dtype == "uint8":
            return not any(each.different_bytes for each in self.tensors.values())
        return all(each.max_abs <= tolerance for each in self.tensors.values())


def compare(a: BlockFile, b: BlockFile, how: How) -> Comparison:
    """Compare the blocks that both files have.  Raises BlockFileError if that means nothing."""
    _check_comparable(a.what, b.what, how)
    rows_a, rows_b = _rows(a.what), _rows(b.what)
    pairs = [(row, rows_b[block]) for block, row in rows_a.items() if block in rows_b]
    if not pairs:
        raise BlockFileError("nothing to compare: the files have no block in common")
    dtype = how.dtype or dtype_of(a.what.fields)
    tensors = {}
    for name, _, _, nbytes in a.what.tensors():
        if nbytes % DTYPES[dtype]:
            raise BlockFileError(f"a block of {name} has {nbytes} bytes: no numbers of {dtype}")
        tensors[name] = _distance(a, b, name, nbytes, pairs, dtype)
    only = len(rows_a) - len(pairs), len(rows_b) - len(pairs)
    return Comparison(dtype, len(pairs), only, tensors)


def _check_comparable(a: Description, b: Description, how: How) -> None:
    differing = differences(a.fields, b.fields)
    if differing and not how.any_fingerprint:
        name, (here, there) = next(iter(differing.items()))
        more = f"; also {' '.join(list(differing)[1:])}" if len(differing) > 1 else ""
        raise BlockFileError(
            f"the fingerprints differ: {name} is {here!r} in the first file, {there!r} in the "
            f"second{more} (--any-fingerprint compares all the same)"
        )
    if a.regions != b.regions or a.block_size != b.block_size:
        raise BlockFileError("blocks of the two files have different sizes or regions")


def _rows(what: Description) -> dict[tuple[bytes, int], int]:
    return {(block.key, block.group): row for row, block in enumerate(what.blocks)}


def _distance(
    a: BlockFile, b: BlockFile, name: str, nbytes: int, pairs: list[tuple[int, int]], dtype: str
) -> Distance:
    found, most = Distance(), max(1, CHUNK_BYTES // nbytes)
    for row_a, row_b, count in _runs(pairs, most):
        found.add(a.rows(name, row_a, row_a + count), b.rows(name, row_b, row_b + count), dtype)
    return found


def _runs(pairs: list[tuple[int, int]], most: int) -> Iterator[tuple[int, int, int]]:
    """Consecutive rows of both files: first rows and number, ``most`` at a time."""
    start = 0
    for end in range(1, len(pairs) + 1):
        last = pairs[end - 1]
        goes_on = end < len(pairs) and pairs[end] == (last[0] + 1, last[1] + 1)
        if not goes_on or end - start == most:
            yield *pairs[start], end - start
            start = end


# -- what people and scripts see


def main(files: tuple[Path, Path], how: How, *, as_json: bool) -> int:
    found = compare(BlockFile(files[0]), BlockFile(files[1]), how)
    equal = found.equal(how.tolerance)
    show(as_data(found, equal), lambda: _lines(found, equal), as_json=as_json)
    return EQUAL if equal else DIFFERENT


def as_data(found: Comparison, equal: bool) -> dict[str, Any]:
    """What ``--json`` prints; null stands for a number that is not finite."""
    return {
        "equal": equal,
        "dtype": found.dtype,
        "blocks": found.blocks,
        "only_in_a": found.only[0],
        "only_in_b": found.only[1],
        "tensors": {name: _measures(found.dtype, each) for name, each in found.tensors.items()},
    }


def _measures(dtype: str, each: Distance) -> dict[str, Any]:
    counted = {"numbers": each.count, "different_bytes": each.different_bytes}
    if dtype == "uint8":
        return counted
    measured = {
        "max_abs": each.max_abs,
        "mean_abs": each.mean_abs,
        "rmse": each.rmse,
        "snr_db": each.snr_db,
        "cosine": each.cosine,
    }
    finite = {name: n if math.isfinite(n) else None for name, n in measured.items()}
    return {**counted, "not_finite": each.not_finite, **finite}


def _lines(found: Comparison, equal: bool) -> Iterator[str]:
    rows = [_COLUMNS, *(_cells(name, found.dtype, each) for name, each in found.tensors.items())]
    yield from aligned(rows, lambda _: True)
    yield (
        f"{'equal' if equal else 'different'}: {found.blocks} blocks as {found.dtype}; "
        f"only in the first file {found.only[0]}, only in the second {found.only[1]}"
    )


def _cells(name: str, dtype: str, each: Distance) -> tuple[str, ...]:
    if dtype == "uint8":
        return (name, *["-"] * 6, str(each.different_bytes))
    numbers = (each.max_abs, each.mean_abs, each.rmse)
    snr, cosine = f"{each.snr_db:.1f}", f"{each.cosine:.8f}"
    measured = (*(f"{number:.4g}" for number in numbers), snr, cosine)
    return (name, *measured, str(each.not_finite), str(each.different_bytes))
