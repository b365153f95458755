"""What a keeper expects of a store's network, from what it has measured of it."""

from __future__ import annotations

from kvshm._engine.costs import REFUSALS_PER_TRIAL
from kvshm.tools.keeper.fetch_times import FetchTimes

MB = 1 << 20


def test_nothing_is_expected_before_something_was_measured() -> None:
    assert FetchTimes().seconds(MB) is None


def test_a_slow_network_is_known_from_the_first_fetch_on() -> None:
    """Or engines would wait for the next ones in vain."""
    times = FetchTimes()
    times.add(8 * MB, 4.0)
    assert times.seconds(8 * MB) == times.seconds(MB) == 4.0
    assert times.seconds(16 * MB) == 8.0


def test_a_first_fetch_that_was_held_up_is_forgotten() -> None:
    times = FetchTimes()
    times.add(8 * MB, 4.0)
    times.add(8 * MB, 0.5)
    assert times.seconds(8 * MB) == 0.5


def test_two_sizes_show_latency_and_rate() -> None:
    times = FetchTimes()
    times.add(MB, 0.25)
    times.add(9 * MB, 1.25)
    assert times.seconds(17 * MB) == 2.25


def test_what_seems_too_slow_is_tried_now_and_then() -> None:
    times = FetchTimes()
    assert times.are_less(1.0, 2.0)
    tried = [times.are_less(2.0, 1.0) for _ in range(2 * REFUSALS_PER_TRIAL)]
    assert tried.count(True) == 2
