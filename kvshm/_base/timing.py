"""How long the coordinator and the scheduler's halves of engines wait for each other.

``Timing`` has the times by which these processes keep track of each other: heartbeats and the
silence that counts as a loss, joins, restarts, events, the end of an engine, pauses before a peer
is used again, and pauses before memory or descriptors that lacked are asked for again; and how
often the coordinator cleans up and checks its bounds.  Code that waits for such a time is given a
``Timing``, by default with the product's values.  ``KVSHM_TEST_TIME_SCALE=<factor>`` in the
environment, read once when this module is imported, multiplies all times of ``Timing`` in this
process (tests only): all processes of a namespace need the same factor.  ``Config.from_env``
refuses a bad factor.

All other times are stated by the modules that wait.  They have no factor, because no factor makes
the machine faster: how long a descriptor server, a lock, a copy, or the end of a thread or process
may take, and libzmq's linger; how old a plan may be; how often a descriptor server checks its
socket, how often slots that drain are looked at, how often a line is logged; and all times of the
worker's half, which exchanges no messages with the coordinator.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from kvshm.errors import ConfigError

VARIABLE = "KVSHM_TEST_TIME_SCALE"


@dataclass(frozen=True)
class Timing:
    """The product's values.  All in seconds; a pair is the shortest and the longest."""

    # -- heartbeats

    heartbeat_seconds: float = 1.0
    """How often engines send Heartbeat and the coordinator sends Tick: each wakes up every process
    of the node."""
    suspect_seconds: float = 3.0
    """Silence of an engine after which the coordinator suspects the engine: two heartbeats may be
    lost."""
    silence_seconds: float = 5.0
    """Silence of the coordinator after which engines consider it lost.  Longer than
    ``suspect_seconds``, since every engine then has to join again."""
    absence_seconds: float = 5.0
    """Time without a message from any coordinator after which the engine logs that there is none.
    A coordinator that is started together with the engines takes about a second."""

    # -- an engine that joins

    describe_seconds: float = 0.05
    """Between two checks whether the engine is ready to join: ranks describe themselves one after
    the other."""
    reply_seconds: float = 2.0
    """How long the answer to a Join may take: the coordinator first fetches the slot table."""
    back_off_seconds: tuple[float, float] = (0.1, 2.0)
    """Pause after a Join that failed: the first pause, and the longest after doubling each time."""
    refused_seconds: float = 30.0
    """Pause after a final refusal: a person has to change something before a Join can succeed."""
    reconnect_seconds: tuple[float, float] = (0.1, 0.2)
    """Between libzmq's attempts to connect to a missing coordinator.  Short, so that engines are
    back with a restarted coordinator within half a second."""
    bug_pause_seconds: float = 0.5
    """How long the client's thread pauses after an unexpected exception, so that a recurring one
    does not take a whole core."""

    # -- a restarted coordinator

    missing_seconds: float = 10.0
    """Engines that have not joined a restarted coordinator by then count as gone."""
    return_tick_seconds: float = 0.2
    """Between two ticks while engines come back to a new coordinator: an engine that missed the
    join of another engine learns of it from the next tick."""
    grace_seconds: float = 3.0
    """How long after its start a coordinator keeps lease bits that no engine has presented:
    engines of the previous coordinator have three heartbeats to come back."""

    # -- events

    send_delay_seconds: float = 0.025
    """How long events wait in the engine.  They arise with a step's output; sending them at once
    would compete for cores and the GIL with the delivery of the tokens.  The price: meanwhile
    peers miss new blocks, and ask in vain for leases on retracted ones.  Longer than
    ``relay_delay_seconds``: if there are many events, those of other engines wake the client's
    thread first, and the engine's own events leave with that wake-up."""
    relay_delay_seconds: float = 0.02
    """How long events wait in the coordinator after the last broadcast of their topic, so that
    many engines wake each engine no more often than one does."""
    rescan_pause_seconds: float = 0.5
    """Average pause between two scans of one engine's table: a scan takes milliseconds per million
    blocks, and a faulty engine may lose events with each message."""

    # -- peers

    quarantine_seconds: float = 30.0
    """How long a peer is not used after it failed several times in a row."""
    handout_pause_seconds: float = 1.0
    """How long no peer is attached after the coordinator failed to hand out a table: the thread
    that waits for the table sends no heartbeats meanwhile."""
    attach_pause_seconds: float = 5.0
    """How long no load is planned from a peer that could not be attached in time: as long as the
    peer's socket may take to answer (``MEMORY_SECONDS`` of kvshm/_shm/descriptors.py)."""
    retry_seconds: tuple[float, float] = (1.0, 30.0)
    """Pause before a retry after a lack of memory or descriptors: the first pause, and the longest
    after doubling each time."""

    # -- the coordinator

    late_leave_seconds: float = 1.0
    """How long an engine whose worker has ended may take to send Leave.  An engine that is stopped
    on purpose does both at the same time; a later Leave is a consequence of the death."""
    cleanup_seconds: float = 30.0
    """How often idle topics are forgotten."""
    leftovers_seconds: float = 5.0
    """How often files of dead engines are removed from the run directory.  An engine that leaves
    and is killed a moment later is in no roster any more: only this finds its sockets."""
    bounds_check_seconds: float = 0.25
    """How often the bounds on connections and memory are checked."""

    def scaled(self, factor: float) -> Timing:
        """Return all times multiplied by ``factor``.  Raises ConfigError unless the factor is a
        positive finite number."""
        if not 0 < factor < math.inf:
            raise ConfigError(f"times cannot be multiplied by {factor}: wanted a number above 0")
        times: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, time in times.items():
            pair = isinstance(time, tuple)
            times[name] = tuple(factor * one for one in time) if pair else factor * time
        return replace(self, **times)


def timing_in(environ: Mapping[str, str]) -> Timing:
    """Return the timing of a process with these environment variables.  Raises ConfigError."""
    if not (text := environ.get(VARIABLE)):
        return Timing()
    try:
        return Timing().scaled(float(text))
    except (ValueError, ConfigError) as exc:
        raise ConfigError(
            f"{VARIABLE}={text!r}: wanted a number above 0, as 0.1; correct it, or unset it"
        ) from exc


TIMING = Timing()
"""The timing of this process."""
with suppress(ConfigError):  # Config.from_env raises it, where callers expect that
    TIMING = timing_in(os.environ)


class RetryPause:
    """The pause between two tries after a lack of memory or descriptors: twice as long after each
    try, up to a bound."""

    def __init__(self, clock: Callable[[], float], timing: Timing = TIMING) -> None:
        self._clock = clock
        self._first, self._longest = timing.retry_seconds
        self._seconds = 0.0
        self._until: float | None = None

    def tried(self) -> None:
        """Begin the next pause; call it with each try."""
        self._seconds = min(self._longest, 2 * self._seconds or self._first)
        self._until = self._clock() + self._seconds

    @property
    def over(self) -> bool:
        """Whether a try is due; True before the first try."""
        return self._until is None or self._clock() >= self._until
