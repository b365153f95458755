"""What a reading says for each metric, in numbers and in Prometheus' text."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvshm._base.copy_path import CopyPath
from kvshm._base.ids import Epoch
from kvshm._node import incompatible
from kvshm._node.protocol import PROTOCOL_VERSION, IncompatibleEngine
from kvshm._shm.error_log import ErrorCode, LoggedError
from kvshm._shm.histograms import NO_VALUES, Distribution
from kvshm._shm.layout import LAYOUT_VERSION, NUM_BUCKETS
from kvshm._shm.progress import LoopProgress
from kvshm._shm.statistics import Counter, Histogram
from kvshm._shm.traffic import Traffic
from kvshm.tools.metrics.command import as_json
from kvshm.tools.metrics.definitions import ENGINE, LEFT_OUT, METRICS, Kind
from kvshm.tools.metrics.exposition import as_text
from kvshm.tools.metrics.samples import Buckets, cumulate, samples_of
from kvshm.tools.node.reading import (
    Blocks,
    EngineReading,
    NamespaceReading,
    NodeReading,
    PeerReading,
)
from kvshm.version import __version__

NOW = 500 * 10**9
UNIX = 1_800_000_000 * 10**9
A, B = ("n", "a", "m"), ("n", "b", "m")


def values(**counts: int) -> Distribution:
    of = {int(bits[1:]): count for bits, count in counts.items()}
    return Distribution(tuple(of.get(bits, 0) for bits in range(NUM_BUCKETS)), 3_000_000_000)


HEALTHY = EngineReading(
    namespace="n",
    epoch=Epoch(1),
    name="a",
    pid=7,
    model="m",
    fingerprint="00",
    block_size=16,
    answers=True,
    owner_died=False,
    died=False,
    retired=False,
    life=(True,),
    heartbeat=3,
    lease_bit=0,
    created_ns=UNIX - 9 * 10**9,
    blocks=Blocks(10, ready=5, draining=2, leased=3, distinct=4, last_copies=1),
    counters=dict.fromkeys((c.label for c in Counter.REGISTRY.values()), 0),
    histograms={h.label: NO_VALUES for h in Histogram.REGISTRY.values()},
    traffic=(),
    progress=(
        LoopProgress("scheduler", 2, NOW - 10**9, idles=True),
        LoopProgress("client", 0, 0, False),
    ),
    coordinator_ns=NOW,
    loads_since=(NOW - 4 * 10**9, NOW - 2 * 10**9),
    errors=(),
    joined=True,
    label="a",
)


def node(*engines: EngineReading, **changed: Any) -> NodeReading:
    space = NamespaceReading(
        "n", coordinated=True, coordinator_answers=True, coordinator_ns=NOW - 10**9
    )
    return NodeReading(NOW, (replace(space, engines=engines, **changed),), UNIX)


def found(name: str, *engines: EngineReading, **changed: Any) -> dict[tuple[str, ...], Any]:
    return dict(samples_of(node(*engines, **changed))[name])


# -- the registry


def test_each_counter_and_histogram_is_shown_once_or_left_out_with_a_reason() -> None:
    shown = [label for metric in METRICS.values() for label in metric.shows]
    known = [c.label for c in Counter.REGISTRY.values()]
    known += [h.label for h in Histogram.REGISTRY.values()]
    assert sorted([*shown, *LEFT_OUT]) == sorted(known)


def test_names_are_as_prometheus_wants_them() -> None:
    for name, metric in METRICS.items():
        assert name.startswith("kvshm_")
        assert name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.help[-1] == "."
        assert len(set(metric.labels)) == len(metric.labels)
        assert not {"epoch", "hash", "request", "pid"} & {*metric.labels}


def test_the_help_of_a_metric_of_one_statistic_is_the_meaning_of_that() -> None:
    known = {each.label: each for kind in (Counter, Histogram) for each in kind.REGISTRY.values()}
    alone = [metric for metric in METRICS.values() if [*metric.shows.values()] == [""]]
    assert len(alone) > 30
    for metric in alone:
        (label,) = metric.shows
        assert metric.help == known[label].meaning
        assert metric.name.endswith("_seconds_total") == (metric.scale == 1e-6)


def test_each_counter_has_its_value_at_its_labels() -> None:
    numbers = {c.label: 100 + c for c in Counter.REGISTRY.values()}
    samples = samples_of(node(replace(HEALTHY, counters=numbers)))
    for metric in METRICS.values():
        if metric.kind is Kind.COUNTER:
            for label, value in metric.shows.items():
                labels = (*A, value) if value else A
                assert samples[metric.name][labels] == numbers[label] * metric.scale
    assert samples["kvshm_prompt_tokens_total"] == {
        (*A, "local"): 109, (*A, "peer"): 110, (*A, "computed"): 111,
    }  # fmt: skip
    assert samples["kvshm_discarded_after_copy_total"] == {
        (*A, "changed"): 140, (*A, "checksum"): 143,
    }  # fmt: skip
    assert samples["kvshm_measured_seconds_total"][A] == pytest.approx(146e-6)


def test_each_histogram_has_its_values_at_its_labels() -> None:
    given = {h.label: values(**{f"b{12 + h}": 1 + h}) for h in Histogram.REGISTRY.values()}
    samples = samples_of(node(replace(HEALTHY, histograms=given)))
    for metric in METRICS.values():
        for label, value in metric.shows.items() if metric.kind is Kind.HISTOGRAM else ():
            labels = (*A, value) if value else A
            shown = samples[metric.name][labels]
            assert shown.cumulated[-1] == (float("inf"), given[label].count)
    assert (*A, "load_at_once") in samples["kvshm_hook_seconds"]
    assert (*A, "staged") in samples["kvshm_import_seconds"]


def test_bounds_are_those_of_buckets_so_each_count_is_exact() -> None:
    shown = cumulate(values(b0=1, b10=2, b11=4, b12=8, b37=16, b38=32), "ns")
    bounds = dict(shown.cumulated)
    assert bounds[1023e-9] == 3  # 0, and what has 10 bits: 1023 ns at most
    assert bounds[4095e-9] == 15
    assert bounds[(2**36 - 1) / 1e9] == 15
    assert bounds[float("inf")] == 63
    assert shown.total == 3.0
    assert list(bounds) == sorted(bounds)
    assert list(bounds.values()) == sorted(bounds.values())
    tokens = dict(cumulate(values(b4=1, b5=2, b21=4), "tokens").cumulated)
    assert (tokens[15], tokens[63], tokens[2**20 - 1], tokens[float("inf")]) == (1, 3, 3, 7)


def test_what_an_engine_copies_is_reported_by_peer_and_path() -> None:
    nvlink, own = CopyPath.NVLINK, CopyPath.OWN
    rows = (
        Traffic("b", 2, nvlink, loads=5, failed=1, blocks=6, nbytes=7, timed_bytes=4,
                timed_ns=2 * 10**9, last_ns=0),
        Traffic("gone", 9, nvlink, 1, 0, 1, 10, 0, 0, 0),
        Traffic("gone", 8, nvlink, 1, 0, 2, 20, 0, 0, 0),
        Traffic("", 7, own, 1, 1, 0, 0, 0, 0, 0),
    )  # fmt: skip
    other = replace(HEALTHY, epoch=Epoch(2), name="b", label="b-0002")
    engines = replace(HEALTHY, traffic=rows), other
    to_b, to_gone = (*A, "b-0002", "nvlink"), (*A, "gone", "nvlink")
    unnamed = (*A, "unknown", "own")
    assert found("kvshm_imports_total", *engines) == {
        (*to_b, "ok"): 4, (*to_b, "failed"): 1, (*to_gone, "ok"): 2, (*to_gone, "failed"): 0,
        (*unnamed, "ok"): 0, (*unnamed, "failed"): 1,
    }  # fmt: skip
    assert found("kvshm_import_bytes_total", *engines) == {to_b: 7, to_gone: 30, unnamed: 0}
    assert found("kvshm_import_blocks_total", *engines)[to_b] == 6
    assert found("kvshm_import_timed_bytes_total", *engines)[to_b] == 4
    assert found("kvshm_import_timed_seconds_total", *engines)[to_b] == 2.0


def test_memory_and_leases() -> None:
    assert found("kvshm_blocks", HEALTHY) == {
        (*A, "empty"): 3, (*A, "ready"): 5, (*A, "draining"): 2,
    }  # fmt: skip
    assert found("kvshm_published_blocks", HEALTHY) == {A: 5}
    assert found("kvshm_last_copy_blocks", HEALTHY) == {A: 1}
    assert found("kvshm_leases", HEALTHY) == {A: 3}
    assert found("kvshm_in_drain", HEALTHY) == {A: 0}
    assert found("kvshm_in_drain", replace(HEALTHY, in_drain=True)) == {A: 1}
    assert found("kvshm_oldest_lease_seconds", HEALTHY) == {("n", "a"): 4.0}
    resting = replace(HEALTHY, loads_since=())
    assert found("kvshm_oldest_lease_seconds", resting) == {("n", "a"): 0.0}
    other = replace(HEALTHY, epoch=Epoch(2), label="b", blocks=Blocks(9, ready=5, distinct=2))
    assert found("kvshm_distinct_blocks", HEALTHY, other) == {("n",): 6}


def test_progress_is_unix_time_and_loops_that_never_went_round_have_none() -> None:
    last = found("kvshm_last_progress_timestamp_seconds", HEALTHY)
    assert last == {(*A, "scheduler"): UNIX / 1e9 - 1}
    assert found("kvshm_pending", HEALTHY) == {(*A, "scheduler"): 2, (*A, "client"): 0}
    assert found("kvshm_coordinator_last_progress_timestamp_seconds") == {("n",): UNIX / 1e9 - 1}
    assert found("kvshm_coordinator_last_progress_timestamp_seconds", coordinator_ns=0) == {}
    assert found("kvshm_epoch_start_timestamp_seconds", HEALTHY) == {A: UNIX / 1e9 - 9}


def test_of_a_clock_that_cannot_be_compared_no_time_is_reported() -> None:
    unknown = replace(HEALTHY, clock_known=False)
    assert found("kvshm_last_progress_timestamp_seconds", unknown) == {}
    assert found("kvshm_oldest_lease_seconds", unknown) == {}
    assert found("kvshm_coordinator_last_progress_timestamp_seconds", coordinator_ns=None) == {}
    checks = found("kvshm_engine_check", unknown)
    assert {check for *_, check in checks} == {"live", "ready"}
    assert found("kvshm_pending", unknown) != {}


def state_of(engine: EngineReading) -> str:
    states = found("kvshm_engine_state", engine)
    assert {labels[-1] for labels in states} == {"healthy", "degraded", "down", "left"}
    ((_, _, _, state),) = (labels for labels, value in states.items() if value)
    return state


def test_the_state_of_an_engine() -> None:
    assert state_of(HEALTHY) == "healthy"
    assert state_of(replace(HEALTHY, joined=False)) == "degraded"
    assert state_of(replace(HEALTHY, owner_died=True, died=True)) == "down"
    assert state_of(replace(HEALTHY, owner_died=True, died=True, retired=True)) == "left"
    assert found("kvshm_engine_check", replace(HEALTHY, joined=False)) == {
        (*A, "live"): 1, (*A, "ready"): 0, (*A, "progress"): 1,
    }  # fmt: skip


def test_an_engine_that_has_ended_keeps_its_counters_and_no_gauges_of_its_memory() -> None:
    ended = replace(HEALTHY, owner_died=True, peers=(PeerReading("b", Epoch(2), False, 0, 1, 1.0),))
    shown = {name for name, series in samples_of(node(ended)).items() if series}
    gone = {
        "blocks", "published_blocks", "keeper", "in_drain", "last_copy_blocks", "leases",
        "oldest_lease_seconds", "last_progress_timestamp_seconds", "pending", "peer_state",
        "replica_lacking_blocks", "replica_lag_seconds",
    }  # fmt: skip
    traffic = {name for name, m in METRICS.items() if m.kind is Kind.COUNTER and not m.shows}
    assert METRICS.keys() - shown == {f"kvshm_{name}" for name in gone} | traffic


def test_coordinators() -> None:
    assert found("kvshm_coordinator_up") == {("n",): 1}
    assert found("kvshm_coordinator_up", coordinator_answers=False) == {("n",): 0}
    assert found("kvshm_coordinator_up", coordinated=False) == {("n",): 0}


# -- peers


def test_missing_blocks_of_a_replica_and_suspected_engines() -> None:
    peers = (
        PeerReading("b", Epoch(2), False, 9, lacking=4, lag_seconds=0.5),
        PeerReading("c", Epoch(3), True, 9, lacking=None, lag_seconds=None),
    )
    engine = replace(HEALTHY, peers=peers)
    assert found("kvshm_peer_state", engine) == {
        (*A, "b", "usable", ""): 1, (*A, "c", "suspected", ""): 1,
    }  # fmt: skip
    assert found("kvshm_replica_lacking_blocks", engine) == {(*A, "b"): 4}
    assert found("kvshm_replica_lag_seconds", engine) == {(*A, "b"): 0.5}


def test_engines_of_one_model_that_cannot_share_are_refused_by_the_field_that_differs() -> None:
    differs = IncompatibleEngine("b", 8, {"kv_dtype": ("auto", "fp8"), "parallel": ("1", "2")})
    about = incompatible.record(differs)
    entry = LoggedError(1, 0, 0, "", ErrorCode.CANNOT_SHARE, about)
    errors = (LoggedError(1, 0, 0, "cannot lease: is b"), entry)
    other = replace(HEALTHY, epoch=Epoch(2), name="b", label="b", fingerprint="ff")
    another = replace(other, epoch=Epoch(3), name="c", label="c", model="x")
    ended = replace(other, epoch=Epoch(4), name="d", label="d", owner_died=True)
    keeper = replace(other, epoch=Epoch(5), name="e", label="e", fingerprint="ee", keeps=True)
    engines = replace(HEALTHY, errors=errors), other, another, ended, keeper
    assert found("kvshm_peer_state", *engines) == {
        (*A, "b", "refused", "kv_dtype"): 1, (*B, "a", "refused", ""): 1,
    }  # fmt: skip


# -- odd readings


def test_without_engines_there_are_the_versions_and_what_namespaces_say() -> None:
    nothing = samples_of(NodeReading(NOW, (), UNIX))
    build = {(__version__, str(LAYOUT_VERSION), str(PROTOCOL_VERSION)): 1}
    assert {name: series for name, series in nothing.items() if series} == {
        "kvshm_build_info": build
    }
    unreadable = found("kvshm_unreadable_engines", unreadable={Epoch(5): "of layout 9"})
    assert unreadable == {("n",): 1}


def test_no_series_appears_twice_whatever_the_names_are() -> None:
    """As when an engine is called what another one's label is."""
    counted = replace(HEALTHY, counters={**HEALTHY.counters, "lookups": 1})
    again = replace(counted, epoch=Epoch(2), blocks=Blocks(10, ready=9))
    assert found("kvshm_lookups_total", counted, again) == {A: 2}
    assert found("kvshm_published_blocks", counted, again) == {A: 5}
    text = as_text(samples_of(node(counted, again)))
    series = [line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#"]
    assert len(series) == len(set(series)) > 300


INJECTED = 'a"} 1\nkvshm_lookups_total{x="\\'
HOSTILE = {
    INJECTED: INJECTED,
    "é\u2028\x00\ufffd{}": "é??\ufffd{}",
    " ": " ",
    "\udcff\x1b[2J": "??[2J",
}


@pytest.mark.parametrize(("name", "shown"), [*HOSTILE.items()])
def test_hostile_names_stay_labels(name: str, shown: str) -> None:
    engine = replace(HEALTHY, label=name, model=name)
    for family in text_string_to_metric_families(as_text(samples_of(node(engine)))):
        for sample in family.samples:
            labels = {label: sample.labels[label] for label in ENGINE if label in sample.labels}
            assert labels.get("engine", shown) == shown
            assert labels.get("model", shown) == shown


def test_the_text_says_what_the_samples_say() -> None:
    engine = replace(HEALTHY, histograms={**HEALTHY.histograms, "import_shm": values(b12=5)})
    text = as_text(samples_of(node(engine)))
    labels = 'engine="a",le="4.095e-06",model="m",namespace="n",path="shm"'
    assert f"\nkvshm_import_seconds_bucket{{{labels}}} 5.0\n" in text
    for name, metric in METRICS.items():
        assert f"\n# TYPE {name} {metric.kind}\n" in text
        assert f"# HELP {name} {metric.help}\n" in text


def test_json_says_the_same() -> None:
    samples = samples_of(node(HEALTHY))
    reported = json.loads(json.dumps(as_json(samples), allow_nan=False))
    assert list(reported) == list(METRICS)
    assert reported["kvshm_leases"] == {
        "type": "gauge",
        "help": METRICS["kvshm_leases"].help,
        "samples": [{"labels": {"namespace": "n", "engine": "a", "model": "m"}, "value": 3}],
    }
    (drained,) = reported["kvshm_drain_wait_seconds"]["samples"]
    shown = samples["kvshm_drain_wait_seconds"][A]
    assert isinstance(shown, Buckets)
    assert [*drained["buckets"]][-1] == "+Inf"
    assert (drained["count"], drained["sum"], len(drained["buckets"])) == (0, 0.0, 15)


def test_the_page_is_the_generated_one() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "metrics.md").read_text("utf-8")
    assert runpy.run_path(str(docs / "generate.py"))["metrics"](page) == page, "make docs"
    for name in METRICS:
        assert page.count(f"| `{name}` |") == 1
