"""How long coordinator and engines wait for each other.

Every such time is a field of ``Timing``; whoever waits is given one, with the product's values
unless told otherwise.  ``KVSHM_TEST_TIME_SCALE=<factor>`` in the environment, read once when this
module is imported, multiplies all of them in this process (tests only): all processes of a
namespace need the same factor.

Not here, because no factor makes the machine faster: how long a descriptor server may take to
answer (kvshm/node/handout.py), how long files are cleared (kvshm/node/locks.py), and libzmq's
linger, the longest that ``close`` waits until a last message is written: it passes only where
nobody reads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import ConfigError

VARIABLE = "KVSHM_TEST_TIME_SCALE"


@dataclass(frozen=True)
class Timing:
    """The product's values.  All in seconds; a pair is the shortest and the longest."""

    # -- who is there

    heartbeat_seconds: float = 1.0
    """How often engines send Heartbeat and the coordinator Tick: each costs every process of the
    node a wake-up."""
    suspect_seconds: float = 3.0
    """Silence of an engine after which the coordinator suspects it: two heartbeats may be lost."""
    silence_seconds: float = 5.0
    """Silence of the coordinator after which engines take it for lost: longer than
    ``suspect_seconds``, since losing the coordinator costs every engine a join."""
    unheard_seconds: float = 5.0
    """After so long without a word from any coordinator the engine says in its log that there is
    none: a coordinator that is started together with the engines takes about a second."""

    # -- an engine that joins

    describe_seconds: float = 0.05
    """Between two questions whether the engine is ready to join: ranks describe themselves one
    after the other."""
    reply_seconds: float = 2.0
    """How long the answer to a Join may take: the coordinator fetches the slot table before."""
    back_off_seconds: tuple[float, float] = (0.1, 2.0)
    """Between two Joins that failed: at first, and at most after doubling it each time."""
    refused_seconds: float = 30.0
    """Before another try where the refusal is final: a person has to change something first."""
    reconnect_seconds: tuple[float, float] = (0.1, 0.2)
    """Between libzmq's tries to connect to a coordinator that is not there.  Short: engines are
    to be back with a restarted coordinator within half a second."""
    bug_pause_seconds: float = 0.5
    """How long the client's thread rests after a bug, so that one that recurs takes no core."""

    # -- a restarted coordinator

    missing_seconds: float = 10.0
    """Engines that have not joined a restarted coordinator by then are gone."""
    return_tick_seconds: float = 0.2
    """Between two ticks while engines come back to a new coordinator: whoever missed that another
    one has joined learns it from the next tick."""
    grace_seconds: float = 3.0
    """How long after its start a coordinator leaves lease bits alone that nobody has presented:
    engines of the coordinator before it have three heartbeats to come back."""

    # -- events

    send_later_seconds: float = 0.025
    """Events wait so long in the engine: they are told with a step's output, and whoever tells
    them at once competes for cores and the GIL with who delivers the tokens.  The price: for so
    long others miss what is new, and ask in vain for leases on what has been withdrawn.  Longer
    than ``relay_seconds``: where there are many events, those of others wake the thread first, and
    its own leave with them."""
    relay_seconds: float = 0.02
    """Events wait so long in the coordinator after the last broadcast of their topic, so that of
    many engines each is woken as often as by one."""
    rescan_pause_seconds: float = 0.5
    """Between two scans of one engine's table, in the long run: a scan takes milliseconds for each
    million blocks, and a confused engine may lose events with each message."""

    # -- peers

    quarantine_seconds: float = 30.0
    """How long a peer is avoided that failed several times in a row."""
    silent_seconds: float = 1.0
    """How long nobody is attached after the coordinator has not handed out a table: whoever waits
    for it sends no heartbeats meanwhile."""
    attaching_seconds: float = 5.0
    """How long nothing is planned from a peer that could not be attached in time: as long as its
    socket may take to answer."""
    try_again_seconds: tuple[float, float] = (1.0, 30.0)
    """Before what has failed for want of memory or descriptors is tried again: at first, and at
    most after doubling it each time."""

    # -- the coordinator

    explain_seconds: float = 1.0
    """How long an engine whose worker has ended may take to say that it leaves.  Whoever stops all
    of its processes at once tells both at the same time; a later leave is what its death led to."""
    leftovers_seconds: float = 30.0
    """How often the run directory is cleared of what the dead left, and idle topics forgotten."""
    look_seconds: float = 0.25
    """How often the bounds on connections and memory are looked after."""

    def scaled(self, factor: float) -> Timing:
        """Return all times multiplied by ``factor``.  Raises ConfigError if that is no positive
        finite number."""
        if not 0 < factor < math.inf:
            raise ConfigError(f"times cannot be multiplied by {factor}: wanted a number above 0")
        times: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, time in times.items():
            pair = isinstance(time, tuple)
            times[name] = tuple(factor * one for one in time) if pair else factor * time
        return replace(self, **times)


def timing_in(environ: Mapping[str, str]) -> Timing:
    """Return the timing of a process with these environment variables.  Raises ConfigError."""
    if (text := environ.get(VARIABLE)) is None:
        return Timing()
    try:
        return Timing().scaled(float(text))
    except ValueError as exc:
        raise ConfigError(f"{VARIABLE}={text!r}: wanted a number above 0, as 0.1") from exc


TIMING = timing_in(os.environ)
"""Of this process."""
