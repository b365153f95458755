"""How long coordinator and engines wait, and that tests can have all of it shortened at once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from itertools import pairwise

import pytest

from kvshm._base.timing import Timing, timing_in
from kvshm._shm.descriptors import MEMORY_SECONDS
from kvshm.errors import ConfigError


def test_every_time_is_scaled() -> None:
    product, scaled = Timing(), Timing().scaled(0.5)
    for field in fields(Timing):
        assert field.name.endswith("_seconds")
        before, after = getattr(product, field.name), getattr(scaled, field.name)
        if isinstance(before, tuple):
            before, after = before[1], after[1]
        assert after == before / 2, field.name


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_who_waits_for_which_is_kept(factor: float) -> None:
    """Each of these before the next, or engines and coordinator take each other for lost."""
    timing = Timing().scaled(factor)
    order = (
        timing.relay_delay_seconds,
        timing.send_delay_seconds,
        timing.return_tick_seconds,
        timing.heartbeat_seconds,
        timing.suspect_seconds,
        timing.silence_seconds,
        timing.missing_seconds,
    )
    assert all(one < other for one, other in pairwise(order))
    assert timing.grace_seconds >= 3 * timing.heartbeat_seconds


def test_no_load_is_planned_while_an_attach_waits_for_its_peer() -> None:
    assert Timing().attach_pause_seconds == MEMORY_SECONDS


def test_the_environment_of_a_process_scales_its_times() -> None:
    program = "from kvshm._base.timing import TIMING; print(TIMING.suspect_seconds)"
    for scale, seconds in ((None, 3.0), ("", 3.0), ("0.5", 1.5)):
        environ = {} if scale is None else {"KVSHM_TEST_TIME_SCALE": scale}
        command = [sys.executable, "-c", program]
        reported = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert float(reported.stdout) == seconds
        assert timing_in(environ).suspect_seconds == seconds


def test_a_scale_that_is_none_is_refused(subtests: pytest.Subtests) -> None:
    for text in ["fast", "0", "-1", "nan", "inf"]:
        with (
            subtests.test(text=text),
            pytest.raises(ConfigError, match=r"KVSHM_TEST_TIME_SCALE=.*: wanted a number above 0"),
        ):
            timing_in({"KVSHM_TEST_TIME_SCALE": text})
