"""Which fault comes when in a run of chaos.py: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import NamedTuple

SEEDS = (1, 2, 3, 5, 8, 13, 21, 34)
"""Seeds of the runs of the tests."""

WEIGHTS = {
    "engine-kill": 12,
    "engine-term": 4,
    "engine-point": 10,
    "engine-stop": 14,
    "rank-kill": 5,
    "rank-stop": 8,
    "coordinator-kill": 6,
    "coordinator-term": 4,
    "coordinator-stop": 6,
    "keeper-kill": 6,
    "keeper-term": 3,
    "keeper-point": 6,
    "keeper-stop": 6,
    "drain": 10,
    "truncate": 14,
    "punch": 4,
    "connections": 5,
    "descriptors": 10,
    "foreign": 14,
    "sparse": 2,
}
"""Every kind of fault and how often it comes, beside the others."""

_GAP_SECONDS = (0.1, 1.0)
_LONG = {
    "coordinator-kill": (0.0, 0.0, 1.0, 6.0),
    "coordinator-term": (0.0, 0.0, 1.0, 6.0),
    "keeper-kill": (0.0, 0.0, 1.0, 6.0),
    "keeper-term": (0.0, 0.0, 1.0, 6.0),
    "keeper-stop": (0.1, 1.0, 4.0, 8.0),
}
"""Seconds that another one stays away, or that a keeper stands still, some longer than it takes to
be suspected."""


class Fault(NamedTuple):
    """One thing that is done to the node."""

    at: float
    kind: str
    victim: float
    """Which of those there are, as a share of their number: 0 is the first."""
    seconds: float
    dice: int
    """What is left to choose, by kind."""


def schedule(
    seed: int, only: Collection[str] = (), without: Collection[str] = ()
) -> Iterator[Fault]:
    """Yield the faults of a run in order, without end.  ``only``: of these kinds, as many in the
    same time; ``without``: the same schedule less these."""
    dice = random.Random(seed)
    weights = {kind: WEIGHTS[kind] for kind in WEIGHTS if kind in only or not only}
    at = 0.0
    while True:
        at += dice.uniform(*_GAP_SECONDS)
        (kind,) = dice.choices(list(weights), list(weights.values()))
        lasts = dice.choice(_LONG[kind]) if kind in _LONG else dice.uniform(0.05, 3.0)
        fault = Fault(at, kind, dice.random(), lasts, dice.getrandbits(32))
        if kind not in without:
            yield fault
