"""What the page shows of each benchmark's lines: also of those that take long, whose results are
not always there."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from performance_page import PROSE, made
from performance_plots import draw
from performance_views import VIEWS, behind, load, peer_lookups

TEXT = tomllib.loads(PROSE.read_text("utf-8"))
ORIGIN: dict[str, Any] = {
    "machine": {"cpu": "a CPU", "cores": 2, "kernel": "6.1", "load": 0.5},
    "versions": {"python": "3.11"},
    "commit": "c0ffee" * 6 + "c0ff-dirty",
    "command": "python benchmarks/bench_this.py",
}


def spread(p50: float) -> dict[str, float]:
    return {"p50": p50, "p99": 3 * p50, "min": p50 / 2, "max": 4 * p50, "n": 1234}


def measured(median: float) -> dict[str, Any]:
    return {"median": median, "over": {"median": 1.5, "low": 1.25, "high": 1.75}}


def arm(p50: float, p90: float, p99: float) -> dict[str, Any]:
    times = {"ttft_p50_ms": p50, "ttft_p90_ms": p90, "ttft_p99_ms": p99}
    return {k: measured(v) for k, v in {"requests_per_second": 3.0, **times}.items()}


def runs(name: str, *computed: float) -> list[dict[str, Any]]:
    return [
        {"arm": name, "failed": 1, "percent_of_tokens": {"computed": each, "imported": 5.0}}
        for each in computed
    ]


ARMS = {"plain-rr": arm(30, 300, 200), "kvshm-rr": arm(20, 50, 300), "kvshm-least": arm(9, 60, 250)}
LOAD = [
    *runs("plain-rr", 10.0, 30.0, 20.0),
    *runs("kvshm-rr", 4.0),
    {
        "benchmark": "load",
        "traffic": {"prefixes": 24, "prefix_tokens": 256, "tail_tokens": 1, "rate": 3.0},
        "blocks": 10,
        "repetitions": 3,
        "against": "plain-rr",
        "arms": ARMS,
        **ORIGIN,
    },
]
RESTART = [
    *runs("kvshm", 20.0),
    *runs("kvshm+keeper+drain", 10.0),
    {
        "rate": 3.0,
        "prefixes": 64,
        "engines": 4,
        "blocks": 260,
        "extra_gb": 0.1,
        "against": "kvshm",
        "arms": {"kvshm": arm(40, 300, 500), "kvshm+keeper+drain": arm(41, 301, 501)},
        **ORIGIN,
    },
]
PARTS = {"plain_ms": spread(2), "with_kvshm_ms": spread(3), "ratio": spread(1.5)}
TRANSFORMERS = [
    {"requests": 16, "tokens": 8192, "prefill": PARTS, "again": PARTS, "decode": PARTS, **ORIGIN}
]
JITTER = {"p50": 0.1, "p99": 2.0, "max": 9.0}
FAULTS = [
    {"row": "importer-killed", "all are free": spread(13.4), "jitter_ms": JITTER, **ORIGIN},
    {"row": "exporter-killed", "no lease succeeds": spread(1.9), "jitter_ms": JITTER, **ORIGIN},
]


@pytest.mark.parametrize(
    ("name", "lines", "row"),
    [
        ("load", LOAD, "| no sharing, round robin | 3.00; 1.50 [1.25, 1.75] |"),
        ("restart", RESTART, "| kvshm, keeper, drain | 3.00; 1.50 [1.25, 1.75] | 41.0;"),
        ("transformers", TRANSFORMERS, "| decode, 16 x 8,192 tokens | 2.00 (6.00) | 3.00 (9.00) |"),
        (
            "faults",
            FAULTS,
            "| importer-killed: all are free | 13.4 | 40.2 | 6.70 to 53.6 | 1,234 |",
        ),
    ],
    ids=["load", "restart", "transformers", "faults"],
)
def test_what_takes_long_has_its_section(name: str, lines: list[dict[str, Any]], row: str) -> None:
    found = made({name: lines}, {**TEXT, "lead": []})
    assert row in found.page
    assert (
        "2 cores, a CPU, Linux 6.1; load 0.5; python 3.11; commit c0ffeec0ffee with changes."
        in (found.page)
    )
    assert "jitter" not in found.page
    assert [*found.plots] == [name]
    assert draw(found.plots[name])


def test_an_arm_is_told_by_the_medians_of_its_runs() -> None:
    view = load(LOAD)
    assert [row[-2:] for row in view.rows] == [("20.0 %", "5.0 %"), ("4.0 %", "5.0 %"), ("", "")]
    assert (view.values["room"], view.values["failed"]) == (3, 4)


def test_the_page_says_where_others_are_faster() -> None:
    assert behind(ARMS) == "no sharing, round robin at p99 (200 ms to 250)"
    assert behind({**ARMS, "plain-rr": arm(30, 300, 260)}) == "nothing"


def test_each_cache_has_its_column_in_each_kind_of_question() -> None:
    of = {name: spread(2.0**n) for n, name in enumerate(("kvshm", "dict", "mooncake", "lmcache"))}
    view = peer_lookups([{"keys": 64, "hit": of, "miss": of}])
    assert [row[0] for row in view.rows] == [
        "64 blocks, all found",
        "64 blocks, the first one missing",
    ]
    assert view.rows[0][1:] == ("1.00 (3.00)", "2.00 (6.00)", "4.00 (12.0)", "8.00 (24.0)")
    assert [row.ours for row in view.plots["hit"].rows] == [True, False, False, False]  # type: ignore[union-attr]


def test_what_has_kvshm_in_it_is_told_apart() -> None:
    """Else a plot does not say whose the dots are."""
    lines = {"load": LOAD, "restart": RESTART}
    for name, of in lines.items():
        (plot,) = VIEWS[name](of).plots.values()
        assert [row.ours for row in plot.rows] == [  # type: ignore[union-attr]
            "no sharing" not in row.label
            for row in plot.rows  # type: ignore[union-attr]
        ]
