"""What has changed between two looks, which paths are slow, and what is told of faults."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvshm._base.copy_path import CopyPath
from kvshm._shm.error_log import LoggedError
from kvshm._shm.histograms import NO_VALUES
from kvshm._shm.traffic import Traffic
from kvshm.tools.node.reading import Blocks, EngineReading, NodeReading, PeerReading
from kvshm.tools.top.copies import ENOUGH_BYTES, find_copies
from kvshm.tools.top.rates import NOTHING, measure
from kvshm.tools.top.view import Reused, View, build_view

from .looks import NOTHING_OBSERVED, SECOND, START_NS, copied, engine, node

GB = 10**9
OWN, SHM, NVLINK, PCIE, STAGED = (
    CopyPath.OWN,
    CopyPath.SHM,
    CopyPath.NVLINK,
    CopyPath.PCIE,
    CopyPath.STAGED,
)


def view_of(before: NodeReading | None, now: NodeReading, wanted: str | None = None) -> View:
    last, start = measure(before or now, now), measure(None, now)
    return build_view(now, last, measure(before, now), start, wanted)


def slow(*engines: object) -> dict[tuple[str, str], str]:
    """The slow pairs of a node, of whatever was copied since its start."""
    whole = measure(None, node(*engines))
    found = find_copies(node(*engines), whole, whole)
    return {(pair.importer, pair.exporter): pair.slow for pair in found if pair.slow}


# -- rates


def test_rates_are_differences_by_the_time_between_the_looks() -> None:
    before = node(engine(1, counters={"discarded": 5}, traffic=[copied(2, 3 * GB)]), engine(2))
    now = node(engine(1, counters={"discarded": 9}, traffic=[copied(2, 7 * GB)]), engine(2), at=2.0)
    rates = measure(before, now)
    first, second = now.engines
    assert rates.seconds == 2.0
    assert rates.a_second(rates.of(first).counted("discarded")) == 2.0
    assert rates.of(first).traffic[0].nbytes == 4 * GB
    assert rates.of(second).counted("discarded") == 0
    assert rates.of(second).counted("a counter of another version") == 0
    shown = {e.engine: e for e in view_of(before, now).engines}
    assert (shown["dp1"].in_bytes_per_second, shown["dp1"].out_bytes_per_second) == (2 * GB, 0)
    assert (shown["dp2"].in_bytes_per_second, shown["dp2"].out_bytes_per_second) == (0, 2 * GB)


@pytest.mark.parametrize(
    ("created", "counted"), [(0.5, 7), (-5.0, 0)], ids=["began", "was there, unread"]
)
def test_a_new_epoch_counts_from_its_beginning(created: float, counted: int) -> None:
    """One that could not be read before would otherwise seem to do hours of work in a second."""
    begun = START_NS + round(created * SECOND)
    now = node(engine(1), engine(3, counters={"discarded": 7}, created_ns=begun), at=1.0)
    rates = measure(node(engine(1), engine(2, counters={"discarded": 900})), now)
    assert rates.of([*now.engines][1]).counted("discarded") == counted
    assert set(rates.engines) == {("n", 1)} | ({("n", 3)} if counted else set())


def test_an_engine_that_ended_and_was_forgotten_takes_nothing_away() -> None:
    before = node(engine(1, counters={"discarded": 3}), engine(2, counters={"discarded": 900}))
    after = view_of(before, node(engine(1, counters={"discarded": 4}), at=1.0))
    assert after.node.discarded_per_second == 1.0
    assert after.node.discarded_since_start == 4


def test_at_the_first_look_no_rate_is_known() -> None:
    counters = {"discarded": 3, "prompt_tokens_local": 30, "prompt_tokens_peer": 10}
    first = view_of(None, node(engine(1, counters=counters, traffic=[copied(2, GB)]), engine(2)))
    assert first.node.discarded_per_second is None
    assert first.node.prompt_tokens_per_second is None
    assert first.engines[0].in_bytes_per_second is None
    assert first.node.discarded_since_start == 3
    assert first.node.tokens.share(first.node.tokens.peer) == 0.25


def test_equal_epochs_of_two_namespaces_are_two_engines() -> None:
    before = node(engine(1, counters={"discarded": 1}), engine(1, namespace="o"))
    now = node(engine(1, counters={"discarded": 3}), engine(1, namespace="o"), at=1.0)
    rates = measure(before, now)
    assert [rates.of(e).counted("discarded") for e in now.engines] == [2, 0]


def test_a_row_of_traffic_that_was_begun_again_counts_from_0() -> None:
    before = node(engine(1, traffic=[copied(2, 9 * GB, loads=9)]))
    now = node(engine(1, traffic=[copied(2, GB, loads=1), copied(3, 5, SHM)]), at=1.0)
    (change,) = measure(before, now).engines.values()
    assert [row.nbytes for row in change.traffic] == [GB, 5]
    assert measure(before, node()).of(next(iter(now.engines))) is NOTHING


# -- the view


def test_tokens_are_shared_out_by_source() -> None:
    counters = {"prompt_tokens_local": 60, "prompt_tokens_peer": 30, "prompt_tokens_computed": 10}
    before = node(engine(1), engine(2))
    now = node(engine(1, counters={**counters, "imported_tokens": 32}), engine(2), at=1.0)
    seen = view_of(before, now)
    tokens = seen.node.tokens
    assert [tokens.share(part) for part in (tokens.local, tokens.peer)] == [0.6, 0.3]
    assert seen.node.prompt_tokens_per_second == 100.0
    assert seen.node.not_prefilled_per_second == 32.0
    nothing = seen.engines[1].tokens
    assert nothing.share(nothing.local) is None


def test_the_time_of_a_step_is_that_of_both_hooks_together() -> None:
    """Quantiles of two hooks cannot be added; means can."""
    build = replace(NO_VALUES, counts=(0,) * 10 + (4, *NO_VALUES.counts[11:]), total=4000)
    output = replace(build, total=1000)
    hooks = NOTHING_OBSERVED | {"hook_build": build, "hook_output": output, "drain_wait": build}
    shown = view_of(None, node(engine(1, histograms=hooks), engine(2)))
    assert (shown.engines[0].hook_mean_ns, shown.engines[0].hook_p99_ns) == (1250, 1023)
    assert shown.engines[0].drain_p99_ns == 1023
    assert (shown.engines[1].hook_mean_ns, shown.engines[1].drain_p99_ns) == (None, None)


def test_lag_counts_between_living_engines_only() -> None:
    def peer(epoch: int, lag: float) -> PeerReading:
        return PeerReading(f"dp{epoch}", epoch, False, 5, 1, lag)

    dead = engine(3, owner_died=True, peers=(peer(1, 50.0),))
    seen = view_of(None, node(engine(1, peers=(peer(2, 0.25), peer(3, 99.0))), engine(2), dead))
    assert seen.node.worst_lag_seconds == 0.25
    assert view_of(None, node(engine(1))).node.worst_lag_seconds is None


def test_copies_of_own_blocks_are_neither_in_nor_out() -> None:
    now = node(engine(1, traffic=[copied(1, GB, OWN), copied(2, 2 * GB)]), engine(2), at=1.0)
    seen = view_of(node(engine(1), engine(2)), now)
    assert seen.engines[0].in_bytes_per_second == 2 * GB
    assert seen.engines[0].out_bytes_per_second == 0
    assert seen.node.bytes_per_second == {OWN: GB, NVLINK: 2 * GB}


def test_what_is_reused_is_counted_a_second_for_each_engine_and_the_node() -> None:
    before = node(engine(1, counters={"duplicates_reused": 5, "last_copies_reused": 1}), engine(2))
    now = node(
        engine(1, counters={"duplicates_reused": 9, "last_copies_reused": 1}),
        engine(2, counters={"last_copies_reused": 6}),
        at=2.0,
    )
    seen = view_of(before, now)
    assert [each.reused for each in seen.engines] == [Reused(2.0, 0.0), Reused(0.0, 3.0)]
    assert seen.node.reused == Reused(2.0, 3.0)
    assert view_of(None, now).node.reused == Reused(None, None)


def test_what_an_engine_holds_is_shared_out_into_duplicates_and_last_copies() -> None:
    (shown,) = view_of(None, node(engine(1, blocks=Blocks(100, ready=50, last_copies=30)))).engines
    assert (shown.published_blocks, shown.duplicate_blocks, shown.last_copy_blocks) == (50, 20, 30)


def test_a_keeper_is_judged_by_what_engines_import_of_what_it_copies() -> None:
    def keeper(evicted: int, seconds: int, *copies: Traffic) -> EngineReading:
        counters = {"evicted": evicted, "evicted_us": seconds * 10**6}
        blocks = Blocks(200, ready=150)
        return engine(9, keeps=True, counters=counters, blocks=blocks, traffic=copies)

    before = node(engine(1), engine(2), keeper(1, 7, copied(1, 10 * GB)))
    now = node(
        engine(1, traffic=[copied(2, 5 * GB), copied(9, 3 * GB)]),
        engine(2, traffic=[copied(9, GB)]),
        keeper(4, 187, copied(1, 14 * GB), copied(2, 4 * GB)),
        at=2.0,
    )
    (shown,) = view_of(before, now).keepers
    assert (shown.engine, shown.filled_share) == ("dp9", 0.75)
    assert (shown.in_bytes_per_second, shown.out_bytes_per_second) == (4 * GB, 2 * GB)
    assert (shown.hit_rate, shown.dropped_after_seconds) == (0.5, 60.0)
    (resting,) = view_of(now, now).keepers
    assert (resting.hit_rate, resting.dropped_after_seconds) == (None, None)


def test_one_engine_is_shown_with_its_pairs() -> None:
    now = node(engine(1, traffic=[copied(2, GB)]), engine(2), engine(3, traffic=[copied(1, GB)]))
    seen = view_of(None, now, wanted="dp2")
    assert [each.engine for each in seen.engines] == ["dp2"]
    assert [(pair.importer, pair.exporter) for pair in seen.copies] == [("dp1", "dp2")]


def test_an_exporter_that_ended_is_shown_for_a_minute() -> None:
    now = node(engine(1, traffic=[copied(9, GB, peer="dp9")]), at=1.0)
    assert [pair.exporter for pair in view_of(node(engine(1)), now).copies] == ["dp9 (ended)"]
    assert view_of(now, now).copies == ()


def test_the_view_is_plain_data() -> None:
    errors = (LoggedError(1, START_NS, START_NS, "e"),)
    now = node(engine(1, traffic=[copied(2, GB)], errors=errors), engine(2), at=1.0)
    shown = json.loads(json.dumps(view_of(node(engine(1)), now).as_json()))
    assert list(shown) == [
        "time", "seconds", "window_seconds", "namespaces", "node", "engines", "keepers", "copies",
        "faults",
    ]  # fmt: skip
    assert shown["copies"][0]["path"] == "nvlink"
    assert shown["engines"][0]["state"] == "healthy"


# -- slow paths


def test_copies_through_host_memory_are_slow() -> None:
    found = slow(engine(1, traffic=[copied(2, 1, STAGED), copied(3, 1, PCIE)]), engine(2))
    assert list(found) == [("dp1", "dp2")]
    assert found["dp1", "dp2"].startswith("staged: through host memory")


def test_pcie_is_slow_where_the_same_engine_uses_nvlink() -> None:
    one = engine(1, traffic=[copied(2, 1, NVLINK), copied(3, 1, PCIE)])
    other = engine(2, traffic=[copied(1, 1, PCIE)])
    assert slow(one, other, engine(3)) == {
        ("dp1", "dp3"): "pcie, while it copies from others by nvlink"
    }


def test_a_pair_is_slow_that_is_several_times_slower_than_the_best_on_its_path() -> None:
    fast, slower = copied(2, ENOUGH_BYTES, SHM), copied(3, ENOUGH_BYTES, SHM, seconds=3.9)
    assert slow(engine(1, traffic=[fast, slower]), engine(2), engine(3)) == {}
    slower = copied(3, ENOUGH_BYTES, SHM, seconds=4.1)
    found = slow(engine(1, traffic=[fast, slower]), engine(2), engine(3))
    assert found == {("dp1", "dp3"): "shm at 0.033 GB/s, 4 times slower than dp1 from dp2"}
    on_another_path = copied(3, ENOUGH_BYTES, PCIE, seconds=4.1)
    assert slow(engine(1, traffic=[copied(2, ENOUGH_BYTES, SHM), on_another_path])) == {}


@pytest.mark.parametrize(
    "few",
    [
        copied(3, ENOUGH_BYTES - 1, SHM, seconds=99),
        copied(3, ENOUGH_BYTES, SHM, loads=99, seconds=99),
    ],
    ids=["few bytes", "small loads"],
)
def test_few_bytes_and_small_loads_say_nothing_of_the_path(few: object) -> None:
    assert slow(engine(1, traffic=[copied(2, ENOUGH_BYTES, SHM), few])) == {}


# -- faults


def test_faults_are_those_of_now_and_then_recorded_ones_the_newest_first() -> None:
    def error(text: str, ago: float, times: int = 1) -> LoggedError:
        at = START_NS + round((100 - ago) * SECOND)
        return LoggedError(times, at, at, text)

    text = "cannot share with dp3: kv_dtype is auto here, fp8 there"
    now = node(
        engine(
            1, errors=(error("old", 90), error(text, 7, 2)), traffic=[copied(2, 1, STAGED)], at=100
        ),
        engine(2, errors=(error(text, 5, 3),), at=100),
        engine(3, owner_died=True),
        at=100,
        coordinated=False,
    )
    found = [(f.kind, f.engines, f.times, f.age_seconds) for f in view_of(None, now).faults]
    assert found == [
        ("state", (), 1, None),
        ("state", ("dp3",), 1, None),
        ("slow", ("dp1",), 1, None),
        ("log", ("dp1", "dp2"), 5, 5.0),
        ("log", ("dp1",), 1, 90.0),
    ]
    codes = [fault.code for fault in view_of(None, now).faults]
    assert codes == ["no-coordinator", "ended", "", "other", "other"]
    texts = [fault.text for fault in view_of(None, now).faults]
    assert texts[0] == "namespace n: no coordinator runs: engines hear of no new engine"
    assert texts[1] == "its process has ended"
    assert texts[3] == text


def test_an_engine_that_no_one_can_share_with_is_named() -> None:
    lonely = engine(3, fingerprint="11")
    found = view_of(None, node(engine(1), engine(2), lonely, engine(4, namespace="o"))).faults
    assert [(fault.kind, fault.engines) for fault in found] == [("alone", ("dp3",))]
    dead = engine(3, fingerprint="11", owner_died=True)
    assert {f.kind for f in view_of(None, node(engine(1), engine(2), dead)).faults} == {"state"}
    keeper = engine(3, fingerprint="11", keeps=True)
    assert view_of(None, node(engine(1), engine(2), keeper)).faults == ()
