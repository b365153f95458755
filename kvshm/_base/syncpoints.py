"""The places where tests stop or kill a real process: one list for C and Python.

``KVSHM_TEST_SYNC_POINT="<name>:<stop|kill|hang>[:<nth>]"``, read when this module is imported,
makes the process stop (SIGSTOP) or die (SIGKILL), or in Python the thread hang, when it reaches the
named point for the nth time (default: first).
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from kvshm.errors import ConfigError

VARIABLE = "KVSHM_TEST_SYNC_POINT"


class SyncPoint(IntEnum):
    """A moment between two changes that other processes can see; the first six are core.h's."""

    PUBLISH_FILLED = 0
    """Slot filled, word not yet READY."""
    PUBLISHED = 1
    """Word READY; event not yet sent."""
    LEASE_LOADED = 2
    """Word and hash read, lease bit not yet set."""
    LEASED = 3
    """Lease bit set, copy not yet begun."""
    RETRACTED = 4
    """Word no longer READY; event not yet sent."""
    FORCED = 5
    """Next generation, although there were leases; block not yet reused."""
    LOAD_PLANNED = 6
    """All leases of a load taken, load not yet handed to the ranks."""
    COPY_BEGINS = 7
    """A rank is about to attach and copy."""
    COPIED = 8
    """A rank's last byte has arrived, re-check not yet done."""
    RELEASED = 9
    """Blocks re-checked and leases released; load not yet reported."""
    BEAT = 10
    """The client's thread is about to write the heartbeat."""


NUM_IN_CORE = 6
_ACTIONS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL, "hang": None}


class SyncPointTrigger(NamedTuple):
    """What happens when this process reaches a sync point for the ``nth`` time."""

    point: SyncPoint
    action: signal.Signals | None
    nth: int = 1


def parse_trigger(text: str) -> SyncPointTrigger:
    """Return what ``<name>:<stop|kill|hang>[:<nth>]`` asks for.  Raises ConfigError."""
    found = re.fullmatch(r"(\w+):(stop|kill|hang)(?::([1-9][0-9]*))?", text)
    if found is None or found[1] not in SyncPoint.__members__:
        raise ConfigError(
            f"{VARIABLE}={text!r}: wanted <name>:<stop|kill|hang>[:<nth>] with a name of"
            f" {', '.join(SyncPoint.__members__)}; correct it, or unset it"
        )
    if found[2] == "hang" and SyncPoint[found[1]] < NUM_IN_CORE:
        raise ConfigError(
            f"{VARIABLE}={text!r}: no thread can hang at {found[1]}, which is in C; stop or kill "
            "the process there, or unset it"
        )
    return SyncPointTrigger(SyncPoint[found[1]], _ACTIONS[found[2]], int(found[3] or 1))


def trigger_in(environ: Mapping[str, str]) -> SyncPointTrigger | None:
    text = environ.get(VARIABLE)
    return parse_trigger(text) if text else None


_armed: SyncPointTrigger | None = None
_visits = itertools.count(1)


def _arm(trigger: SyncPointTrigger) -> None:
    global _armed
    from kvshm import (
        _native,  # only here: docs/generate.py has to run while the native module refuses
    )

    if trigger.action is not None and trigger.point < _native.NUM_SYNC_POINTS:
        _native.arm_sync_point(trigger.point, trigger.action, trigger.nth)
    else:
        _armed = trigger


def sync_point(point: SyncPoint) -> None:
    """Mark a SYNC POINT of the Python code."""
    if _armed is None or _armed.point is not point:
        return
    if next(_visits) == _armed.nth:
        if _armed.action is None:
            threading.Event().wait()
        else:  # raise_signal, not kill: this thread must receive the signal
            signal.raise_signal(_armed.action)


with suppress(ConfigError):  # Config.from_env raises it, where callers expect that
    if (_asked := trigger_in(os.environ)) is not None:
        _arm(_asked)
