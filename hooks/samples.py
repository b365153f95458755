"""Samples of tensors, by which a later look finds that somebody has written into them.

A full read of a model's weights takes seconds, a look at samples a millisecond.  A grid of 1,024
places or more of every tensor is read once; each look compares the next row of it, 64 places or
more.  Its start is random, and a row's places are an odd number of elements apart, so that they
fall into different columns of a matrix.

    look 0   x . . . . x . . . . x . . . .        one row of each tensor, read by one
    look 1   . x . . . . x . . . . x . . .        operation for all tensors of a part

Between two neighbouring places of the grid, before the first and after the last, are fewer elements
than a 1,024th of the tensor's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any, TypeAlias

import torch

from .weights import Place, digest_tensors, outermost_first, where

LOOKS = 16
"""Rows of the grid, each compared by one look."""
PER_LOOK = 64
"""Fewest places of a tensor in one row; one with up to four times as many is compared as a
whole."""
PART = 64
"""Tensors that one look reads at a time, which holds the interpreter for a tenth of a
millisecond."""
EQUAL_WRITES = 3
"""How often a tensor may be written without a change before its writes count only once in LOOKS."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Samples:
    """Samples of all tensors in some places, taken when it is made.

    One thread at a time.  Holds the tensors, so they stay mapped, except in sleep mode: never look
    then.  Raises what torch raises for a tensor that cannot be sampled.
    """

    def __init__(
        self,
        places: Iterable[Place],
        random: Callable[[], float],
        code: Callable[[], object] = lambda: None,
    ) -> None:
        """``random`` returns numbers from 0 to 1; ``code`` what is compared besides the tensors."""
        self._places = list(places)
        self._random = random
        self._code, self._code_was = code, code()
        found = {id(p.value): p for p in reversed(self._places) if _has_elements(p.value)}
        tensors = sorted(((p.name, p.value) for p in found.values() if not p.converts), key=_kind)
        alone = [[(p.name, p.value)] for p in found.values() if p.converts]
        self._tables = [(p.name, p.value) for p in self._places if isinstance(p.value, dict)]
        self._lengths = self._lengths_now()
        self._digests: dict[object, bytes] = {}
        self._convertible = {where(tensor): _digest(tensor) for ((_, tensor),) in alone}
        """Digests of the tensors that the model may convert."""
        # A step may run in inference mode, and a later look, outside it, could not write into
        # tensors that were made in it.
        with torch.inference_mode(False), torch.no_grad():
            self.parts = [
                _Part(chosen, random)
                for _, alike in groupby(tensors, _kind)
                for chosen in _in_parts(list(alike))
            ]
            self.parts += [_Part(single, random) for single in alone]
        self._row = self._next = 0

    def digested(self, digests: dict[object, bytes]) -> None:
        """Keep the digests of each tensor, computed after the samples were taken."""
        self._digests = digests | self._convertible

    def look(self) -> str:
        """Compare the next part; returns the name of a tensor that was written or replaced, empty:
        none."""
        if self._next == 0:
            for number, (name, holder, key, value, converts) in enumerate(self._places):
                if holder is None or (now := holder.get(key)) is value:
                    continue
                if not (converts and self._is_unwritten(value) and _same_numbers(value, now)):
                    return name
                self._follow(number, now)
            if (lengths := self._lengths_now()) != self._lengths:
                pairs = zip(self._tables, lengths, self._lengths, strict=True)
                return next(name for (name, _), now, before in pairs if now != before)
            if self._code() != self._code_was:
                return "the model, or its modules' classes or forward hooks"
        if not self.parts:
            return ""
        found = self.parts[self._next].look(self._row, self._digests)
        self._next = (self._next + 1) % len(self.parts)
        self._row = (self._row + (self._next == 0)) % LOOKS
        return found

    def _lengths_now(self) -> list[int]:
        return [len(table) for _, table in self._tables]

    def _is_unwritten(self, value: Any) -> bool:
        """Whether a tensor that the model has converted still has the numbers that it had."""
        return _has_elements(value) and self._digests.get(where(value)) == _digest(value)

    def _follow(self, number: int, now: Any) -> None:
        """The model has converted a tensor: sample the new one in its place."""
        before = self._places[number]
        self._places[number] = before._replace(value=now)
        self._digests[where(now)] = _digest(now)
        with torch.inference_mode(False), torch.no_grad():
            new = _Part([(before.name, now)], self._random)
        self.parts = [part for part in self.parts if not part.is_of(before.value)] + [new]

    def look_at_all(self) -> str:
        """As ``look``, for all parts."""
        self._next = 0
        looks = (self.look() for _ in range(max(1, len(self.parts))))
        return next(filter(None, looks), "")


class _Part:
    """Tensors of one device whose elements have one size."""

    def __init__(self, named: Sequence[tuple[str, Any]], random: Callable[[], float]) -> None:
        self._names = [name for name, _ in named]
        self._tensors: list[torch.Tensor] = [tensor for _, tensor in named]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._counting = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._writes = [tensor._version for tensor in self._counting]
        self._equal_writes: Counter[int] = Counter()
        rows = [_rows_of(tensor.detach(), random()) for tensor in self._tensors]
        self._holes = [(i, row_of) for i, row_of in enumerate(rows) if callable(row_of)]
        self._rows = [[_at(each, row) for each in rows] for row in range(LOOKS)]
        self._ends = list(accumulate(map(len, self._rows[0])))
        some = self._tensors[0]
        self._reader = _reader(some.device, _WORDS[_size(some)], self._ends[-1])
        self._known = torch.stack([self._read(row).clone() for row in range(LOOKS)])

    def is_of(self, tensor: object) -> bool:
        """Whether this is the part of one tensor, which is ``tensor``."""
        return len(self._tensors) == 1 and self._tensors[0] is tensor

    def look(self, row: int, digests: dict[object, bytes]) -> str:
        """Return the name of the first tensor that differs, empty if there is none."""
        # First: the memory of a tensor whose storage was emptied is gone.
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if addresses != self._addresses:
            pairs = zip(self._names, addresses, self._addresses, strict=True)
            return next(name for name, now, before in pairs if now != before)
        now, known = self._read(row), self._known[row]
        if not torch.equal(now, known):
            return self._names[bisect_right(self._ends, int((now != known).nonzero()[0]))]
        if [tensor._version for tensor in self._counting] != self._writes:
            return self._counted(digests, last=row == LOOKS - 1)
        return ""

    def _counted(self, digests: dict[object, bytes], last: bool) -> str:
        """Return the name of a tensor changed by writes that torch has counted, or empty.  Blocks
        while it reads these tensors.  ``last``: this look completes the grid."""
        for place, tensor in enumerate(self._counting):
            writes = tensor._version
            if writes == self._writes[place]:
                continue
            if self._equal_writes[place] >= EQUAL_WRITES and not last:
                continue
            self._writes[place] = writes
            if digests.get(where(tensor)) != _digest(tensor):
                return next(
                    n for n, t in zip(self._names, self._tensors, strict=True) if t is tensor
                )
            self._equal_writes[place] += 1
        return ""

    def _read(self, row: int) -> torch.Tensor:
        views = self._rows[row]
        for place, row_of in self._holes:
            views[place] = row_of(row)
        with torch.no_grad():
            return self._reader(views)


Rows: TypeAlias = Sequence[torch.Tensor] | Callable[[int], torch.Tensor]
"""Each row of a tensor's grid: views or, if the tensor has holes, what copies them."""


def _at(rows: Rows, row: int) -> torch.Tensor:
    return rows(row) if callable(rows) else rows[row]


def _rows_of(tensor: torch.Tensor, start: float) -> Rows:
    """Return the rows of the tensor's grid.  ``start``: where the grid begins, from 0 to 1."""
    ordered = outermost_first(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    words = ordered.view(_WORDS[ordered.element_size()])
    size = words.numel()
    apart = (size // PER_LOOK - 1) | 1 if size > 4 * PER_LOOK else 1
    while (apart + size % apart) * PER_LOOK > size and apart > 1:
        apart -= 2  # until the rows' starts, ``width`` below, lie within a 64th of the tensor
    per = size // apart
    # The rows begin evenly over what the first place leaves of the tensor for the last one.
    width = size - (per - 1) * apart
    rows = [width * row // LOOKS for row in range(LOOKS)]
    first = int(start * (width - rows[-1]))
    if words.is_contiguous():
        at = words.storage_offset() + first
        return [words.as_strided((per,), (apart,), at + row) for row in rows]
    every = torch.arange(size, device=words.device)
    index = torch.stack([every.as_strided((per,), (apart,), first + row) for row in rows])
    return lambda row: torch.take(words, index[row])


def _reader(
    device: torch.device, word: torch.dtype, size: int
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Return what gathers views into one tensor of this process."""
    gathered = torch.empty(size, dtype=word, device=device)
    if device.type == "cpu":
        return lambda views: torch.cat(views, out=gathered)
    return _OnDevice(gathered)


class _OnDevice:
    """Gathers on a device, on a stream of its own, and copies to pinned memory: nothing else on the
    device waits, and no other thread."""

    def __init__(self, gathered: torch.Tensor) -> None:
        self._gathered = gathered
        self._stream = torch.cuda.Stream(gathered.device)
        self._copied = torch.cuda.Event(blocking=True)
        self._here = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)

    def __call__(self, views: list[torch.Tensor]) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            torch.cat(views, out=self._gathered)
            self._here.copy_(self._gathered, non_blocking=True)
            self._copied.record()
        self._copied.synchronize()
        return self._here


def _digest(tensor: torch.Tensor) -> bytes:
    """The digest of one tensor by ``digest_tensors``."""
    found: dict[object, bytes] = {}
    digest_tensors([("", tensor.detach())], found)
    return found[where(tensor)]


def _has_elements(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _same_numbers(before: Any, now: object) -> bool:
    """Whether one tensor was converted to the other's format and device."""
    if not (_has_elements(before) and isinstance(now, torch.Tensor)):
        return False
    if now.device.type != "cpu":  # the conversion may still be under way there
        torch.cuda.synchronize(now.device)
    with torch.no_grad():
        return bool(torch.equal(before.to(now.device, now.dtype), now))


def _size(tensor: torch.Tensor) -> int:
    """Bytes of one word that is compared."""
    size: int = tensor.element_size()
    return size // (2 if tensor.is_complex() else 1)


def _kind(named: tuple[str, Any]) -> tuple[str, int]:
    return str(named[1].device), _size(named[1])


def _in_parts(tensors: list[tuple[str, Any]]) -> Iterable[list[tuple[str, Any]]]:
    return (tensors[first : first + PART] for first in range(0, len(tensors), PART))
