"""engine.costs: what is imported and what computed, before and after something was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshm._engine.costs import (
    REFUSALS_PER_TRIAL,
    UNMEASURED_TOKENS,
    WARM_UP_STEPS,
    Costs,
    LinearFit,
)

MEGABYTE = 1_000_000


def measured(per_token: float, latency: float, per_byte: float) -> Costs:
    costs = Costs()
    for _ in range(20):
        for tokens in (1, 8, 500, 2000):
            costs.add_step(tokens, 0.005 + per_token * tokens)
        for nbytes in (MEGABYTE, 20 * MEGABYTE):
            costs.add_load(nbytes, latency + per_byte * nbytes)
    return costs


@given(st.floats(0, 1), st.floats(1e-9, 1e-2))
def test_a_line_is_found_again(fixed: float, each: float) -> None:
    line = LinearFit()
    for count in (1, 10, 100, 1000) * 5:
        line.add(count, fixed + each * count)
    fit = line.fit()
    assert fit is not None
    assert fit[0] + 1000 * fit[1] == pytest.approx(fixed + 1000 * each, rel=1e-3, abs=1e-6)


def test_the_latest_weighs_most() -> None:
    costs = measured(1e-3, 1e-3, 1e-9)
    for _ in range(200):
        for tokens in (1, 2000):
            costs.add_step(tokens, 0.005 + 1e-5 * tokens)
    assert costs.compute_seconds(1000) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("tokens", [UNMEASURED_TOKENS - 1, UNMEASURED_TOKENS])
def test_before_anything_is_measured_long_prefixes_are_imported(tokens: int) -> None:
    costs = Costs()
    for _ in range(50):
        costs.add_step(8, 0.01)  # decodes say nothing of prefill
    assert costs.compute_seconds(tokens) is None
    assert costs.worth(tokens, MEGABYTE, 0.0) is (tokens == UNMEASURED_TOKENS)


def test_an_engine_that_finds_everything_elsewhere_computes_now_and_then_to_see() -> None:
    """Soon, until prefill was seen twice: a first step may be slow."""
    costs = Costs()
    for _ in range(WARM_UP_STEPS):
        costs.add_step(1, 0.005)
    imported = []
    for _ in range(200):
        imported.append(costs.worth(400, MEGABYTE, 0.0))
        if not imported[-1]:
            costs.add_step(400, 3.0)
    computed = [n for n, yes in enumerate(imported, 1) if not yes]
    assert computed == [8, 16, 80, 144]


def test_a_first_prefill_that_was_slow_is_found_out_by_the_second() -> None:
    costs = measured(1e-5, 1e-3, 1e-9)
    costs._steps, costs._prefills, costs.known = LinearFit(), 0, False
    costs.add_step(400, 3.0)
    imported = [costs.worth(400, 500 * MEGABYTE, 0.0) for _ in range(8)]
    assert imported == [True] * 7 + [False]
    costs.add_step(400, 0.006)
    assert costs.known
    assert not costs.worth(400, 500 * MEGABYTE, 0.0)


def test_prompts_of_one_size_price_prefill_by_the_whole_step() -> None:
    costs = Costs()
    for _ in range(WARM_UP_STEPS + 2):
        assert not costs.known
        costs.add_step(400, 0.006)
    assert costs.known
    assert costs.compute_seconds(200) == pytest.approx(0.003)


def test_short_steps_are_prefills_where_none_is_longer() -> None:
    costs = Costs()
    costs.prefill_tokens = 128
    for _ in range(WARM_UP_STEPS):
        costs.add_step(128, 0.006)
        assert costs.compute_seconds(128) is None
    costs.add_step(1, 0.005)
    costs.add_step(128, 0.006)
    assert costs.compute_seconds(127) == pytest.approx(0.001)


def test_what_is_computed_sooner_is_not_imported() -> None:
    fast_copies = measured(per_token=5e-5, latency=2e-4, per_byte=1e-10)
    assert fast_copies.worth(1000, 10 * MEGABYTE, 0.0)
    assert not fast_copies.worth(1000, 10 * MEGABYTE, waiting=0.06)  # two steps of 30 ms
    assert not fast_copies.worth(1, 10_000, 0.0)
    slow_copies = measured(per_token=1e-6, latency=1e-3, per_byte=1e-9)
    assert not slow_copies.worth(1000, 10 * MEGABYTE, 0.0)


def test_estimates_of_copies_grow_with_their_bytes() -> None:
    costs = Costs()
    assert 0 < costs.load_seconds(MEGABYTE) < costs.load_seconds(100 * MEGABYTE)
    for _ in range(2):  # the first does not count
        costs.add_load(MEGABYTE, 0.002)
    assert costs.load_seconds(MEGABYTE) == pytest.approx(0.002)
    assert costs.load_seconds(3 * MEGABYTE) == pytest.approx(0.003)  # what is more at 2 GB/s
    assert costs.load_seconds(10) == pytest.approx(0.002)


def test_steps_out_of_the_ordinary_say_little() -> None:
    costs = Costs()
    for _ in range(WARM_UP_STEPS):
        costs.add_step(2000, 30.0)
    for _ in range(20):
        for tokens in (1, 500, 2000):
            costs.add_step(tokens, 0.005 + 1e-5 * tokens)
    costs.add_step(2000, 10.0)
    assert costs.compute_seconds(1000) == pytest.approx(0.01, rel=0.6)


def test_what_makes_no_sense_is_not_learnt() -> None:
    costs = Costs()
    costs.add_step(0, 1.0)
    costs.add_step(5, 0.0)
    costs.add_load(0, 1.0)
    costs.add_load(5, -1.0)
    assert costs.step_seconds() == 0
    assert costs.load_seconds(0) == Costs().load_seconds(0)


@pytest.mark.parametrize("per_token", [3e-6, 70e-6])
def test_prefills_price_outlives_any_number_of_decodes(per_token: float) -> None:
    """Also where a decode's own price grows with its batch, by more than prefill's."""
    costs = measured(per_token, 3e-4, 5e-10)
    for n in range(5000):
        batch = 1 + n % 64
        costs.add_step(batch, 0.005 + 40e-6 * batch)
    assert costs.compute_seconds(2000) == pytest.approx(2000 * per_token, rel=0.1)


def test_decodes_of_many_requests_are_no_prefill() -> None:
    costs = Costs()
    for n in range(500):
        batch = 1 + n % 128
        costs.add_step(batch, 0.005 + 40e-6 * batch)
    assert costs.compute_seconds(1000) is None


@pytest.mark.parametrize("tokens", [1, 500, 2000])
def test_a_slow_first_step_of_its_size_is_forgotten_with_the_next(tokens: int) -> None:
    costs = Costs()
    for _ in range(WARM_UP_STEPS):
        costs.add_step(1, 0.005)
    costs.add_step(tokens, 60.0)
    for _ in range(2):
        for each in (1, 500, 2000):
            costs.add_step(each, 0.005 + 1e-5 * each)
    assert costs.compute_seconds(1000) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("seconds", [0.05, 2.0, 60.0])
def test_one_slow_load_does_not_end_importing(seconds: float) -> None:
    new, used = measured(70e-6, 3e-4, 2e-10), measured(70e-6, 3e-4, 2e-10)
    new._loads, new._loaded = LinearFit(), 0
    for costs in (new, used):
        costs.add_load(2 * MEGABYTE, seconds)
        assert costs.worth(512, 2 * MEGABYTE, 0.006)
        assert costs.worth(8000, 32 * MEGABYTE, 0.006)


def test_copies_that_have_become_slow_are_learnt_all_the_same() -> None:
    costs = measured(70e-6, 3e-4, 2e-10)
    for _ in range(100):
        costs.add_load(20 * MEGABYTE, 1.0)
    assert costs.load_seconds(20 * MEGABYTE) == pytest.approx(1.0, rel=0.2)


def test_now_and_then_a_refused_import_is_tried() -> None:
    costs = Costs()
    tried = [costs.try_anyway() for _ in range(2 * REFUSALS_PER_TRIAL)]
    assert [n for n, yes in enumerate(tried, 1) if yes] == [64, 128]


def test_imports_of_one_size_are_compared_with_computing_as_much() -> None:
    """They do not show what a shorter one takes."""
    costs = Costs()
    assert costs.import_ratio(256, MEGABYTE) == 0
    for _ in range(20):
        costs.add_step(1, 0.005)
        costs.add_step(2048, 0.105)
        costs.add_load(8 * MEGABYTE, 0.01)
    # 10 ms, and a step of 5 ms, in place of 100 ms.
    assert costs.import_ratio(256, MEGABYTE) == pytest.approx(0.15, rel=0.01)
