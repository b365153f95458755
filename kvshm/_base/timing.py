"""How long the coordinator and the scheduler's halves of engines wait for each other.

``KVSHM_TEST_TIME_SCALE=<factor>``, read at the import of this module, multiplies all these times in
tests, in all processes of a namespace.  Times that depend on the machine stand elsewhere.
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
    """How often engines send Heartbeat and the coordinator sends Tick."""
    suspect_seconds: float = 3.0
    """Silence after which the coordinator suspects an engine: two heartbeats may be lost."""
    silence_seconds: float = 5.0
    """Silence of the coordinator after which engines join again."""
    absence_seconds: float = 5.0
    """Time without any coordinator after which the engine logs that there is none."""

    # -- an engine that joins

    describe_seconds: float = 0.05
    """Between two checks whether the engine is ready to join."""
    reply_seconds: float = 2.0
    """How long the answer to a Join may take: the coordinator first fetches the slot table."""
    back_off_seconds: tuple[float, float] = (0.1, 2.0)
    """Pause after a Join that failed: the first pause, and the longest after doubling each time."""
    refused_seconds: float = 30.0
    """Pause after a final refusal: a person has to change something before a Join can succeed."""
    reconnect_seconds: tuple[float, float] = (0.1, 0.2)
    """Between libzmq's attempts to connect to a missing coordinator."""
    bug_pause_seconds: float = 0.5
    """Pause of the client's thread after an unexpected exception."""

    # -- a restarted coordinator

    missing_seconds: float = 10.0
    """Engines that have not joined a restarted coordinator by then count as gone."""
    return_tick_seconds: float = 0.2
    """Between two ticks while engines come back to a new coordinator."""
    grace_seconds: float = 3.0
    """How long a new coordinator keeps lease bits that no engine has presented yet."""

    # -- events

    send_delay_seconds: float = 0.048
    """How long events wait in the engine, unless its client's thread has rested for as long before:
    longer than ``relay_delay_seconds``, so that others' events wake that thread first, and the own
    ones leave with that wake-up."""
    relay_delay_seconds: float = 0.04
    """How long events wait in the coordinator after the last broadcast of their topic."""
    awaited_delay_seconds: float = 0.02
    """The same for events of which an engine has given a receipt."""
    rescan_pause_seconds: float = 0.5
    """Average pause between two scans of one engine's table."""

    # -- peers

    quarantine_seconds: float = 30.0
    """How long a peer is not used after it failed several times in a row."""
    handout_pause_seconds: float = 1.0
    """How long no peer is attached after the coordinator failed to hand out a table."""
    attach_pause_seconds: float = 5.0
    """How long no load is planned from a peer that could not be attached in time."""
    retry_seconds: tuple[float, float] = (1.0, 30.0)
    """First and longest pause before a retry when memory or descriptors ran out."""

    # -- the coordinator

    late_leave_seconds: float = 1.0
    """How long an engine whose worker has ended may take to send Leave."""
    cleanup_seconds: float = 30.0
    """How often idle topics are forgotten."""
    leftovers_seconds: float = 5.0
    """How often files of dead engines are removed from the run directory."""
    bounds_check_seconds: float = 0.25
    """How often the bounds on connections and memory are checked."""

    def scaled(self, factor: float) -> Timing:
        """Return all times multiplied by ``factor``.  Raises ConfigError."""
        if not 0 < factor < math.inf:
            raise ConfigError(f"times cannot be multiplied by {factor}: wanted a number above 0")
        times: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, time in times.items():
            pair = isinstance(time, tuple)
            times[name] = tuple(factor * one for one in time) if pair else factor * time
        return replace(self, **times)


def timing_in(environ: Mapping[str, str]) -> Timing:
    if not (text := environ.get(VARIABLE)):
        return Timing()
    try:
        return Timing().scaled(float(text))
    except (ValueError, ConfigError) as exc:
        raise ConfigError(
            f"{VARIABLE}={text!r}: wanted a number above 0, as 0.1; correct it, or unset it"
        ) from exc


TIMING = Timing()
with suppress(ConfigError):  # Config.from_env raises it, where callers expect that
    TIMING = timing_in(os.environ)


class RetryPause:
    """The back-off after memory or descriptors ran out: doubled by each try, up to a bound."""

    def __init__(self, clock: Callable[[], float], timing: Timing = TIMING) -> None:
        self._clock = clock
        self._first, self._longest = timing.retry_seconds
        self._seconds = 0.0
        self._until: float | None = None

    def tried(self) -> None:
        self._seconds = min(self._longest, 2 * self._seconds or self._first)
        self._until = self._clock() + self._seconds

    @property
    def over(self) -> bool:
        """Whether a try is due; True before the first try."""
        return self._until is None or self._clock() >= self._until
