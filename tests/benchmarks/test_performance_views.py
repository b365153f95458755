"""What the page shows of each benchmark's lines: also of those that take long, whose results are
not always there."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from performance_arms import behind, first_token, load
from performance_page import PROSE, made
from performance_plots import Curves, draw
from performance_views import VIEWS, peer_lookups

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
        {
            "arm": name,
            "rate": 3.0,
            "failed": 1,
            "percent_of_tokens": {"computed": each, "imported": 5.0},
        }
        for each in computed
    ]


ARMS = {"plain-rr": arm(30, 300, 200), "kvshm-rr": arm(20, 50, 300), "kvshm-least": arm(9, 60, 250)}
LOAD = [
    *runs("plain-rr", 10.0, 30.0, 20.0),
    *runs("kvshm-rr", 4.0),
    {"arm": "plain-rr", "rate": 9.0, "percent_of_tokens": {"computed": 99.0, "imported": 0.0}},
    {
        "benchmark": "load",
        "traffic": {"prefixes": 24, "prefix_tokens": 256, "tail_tokens": 1},
        "blocks": 10,
        "repetitions": 3,
        "against": "plain-rr",
        "rates": {"1.0": ARMS, "3.0": {**ARMS, "offload-rr": {"errors": ["no GPU"]}}, "9.0": ARMS},
        "target_ms": 500.0,
        "goodput": {
            "kvshm-rr": {"best": 5.25, "sustained": 3.0},
            "plain-rr": {"best": 2.5, "sustained": None},
        },
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
RATIO = {"median": 1.04, "low": 1.01, "high": 1.08}


def ways(imported: float) -> dict[str, Any]:
    return {
        **{f"{way}_ms": spread(ms) for way, ms in (("computed", 1000.0), ("local_hit", 40.0))},
        "imported_ms": spread(imported),
        "imported_over_local_hit": RATIO,
        "imported_over_local_hit_p99": {"ratio": 1.3, "low": 1.1, "high": 1.5},
    }


IMPORT = [
    {
        "imported_tokens": 3456,
        "tail_tokens": 44,
        "arms": {"kvshm": ways(41), "lmcache": ways(81), "offload": {"rounds_left_out": 5}},
        "lengths": {"kvshm": {"256": ways(10)}, "lmcache": {"256": ways(20)}, "offload": {}},
        "pays_from_tokens": {"kvshm": 256, "lmcache": None},
        **ORIGIN,
    }
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
        ("load", LOAD, "| vLLM's offloading, round robin: failed: no GPU |  |"),
        ("load", LOAD, "within 500 ms: kvshm, round robin 5.25 (up to 3 nearly all), no sharing"),
        ("import", IMPORT, "| LMCache: imported | 81.0 | 243 |"),
        ("import", IMPORT, "| imported, of a hit in the own cache (p99) | ≤ 1.2 times | 1.30"),
        ("import", IMPORT, "| ≤ 256 tokens | 256 tokens | met |"),
        ("restart", RESTART, "| kvshm, keeper, drain | 3.00; 1.50 [1.25, 1.75] | 41.0;"),
        ("restart", RESTART, "for 64 prefixes; 2 requests failed."),
        ("transformers", TRANSFORMERS, "| decode, 16 x 8,192 tokens | 2.00 (6.00) | 3.00 (9.00) |"),
        (
            "faults",
            FAULTS,
            "| importer-killed: all are free | 13.4 | 40.2 | 6.70 to 53.6 | 1,234 |",
        ),
    ],
)
def test_what_takes_long_has_its_section(name: str, lines: list[dict[str, Any]], row: str) -> None:
    found = made({name: lines}, {**TEXT, "lead": []})
    assert row in " ".join(found.page.split("\n"))
    assert (
        "2 cores, a CPU, Linux 6.1; load 0.5; python 3.11; commit c0ffeec0ffee with changes."
        in (found.page)
    )
    assert "jitter" not in found.page
    more = {"load": ["load-rates"], "import": ["import-lengths"]}
    assert [*found.plots] == [name, *more.get(name, ())]
    for plot in found.plots.values():
        assert draw(plot)


def test_arms_are_shown_at_the_highest_rate_that_is_kept_up_with() -> None:
    view = load(LOAD)
    assert [row[-2:] for row in view.rows][:3] == [
        ("20.0 %", "5.0 %"), ("4.0 %", "5.0 %"), ("", ""),
    ]  # fmt: skip
    assert (view.values["room"], view.values["rate"]) == (3, 3.0)
    rates = view.plots["rates"]
    assert isinstance(rates, Curves)
    assert rates.series["kvshm, least load"] == [(1.0, 60), (3.0, 60), (9.0, 60)]


def test_lengths_are_those_of_all_prefixes() -> None:
    lengths = first_token(IMPORT).plots["lengths"]
    assert isinstance(lengths, Curves)
    assert lengths.series == {
        "computed": [(256, 1000), (3456, 1000)],
        "kvshm: imported": [(256, 10), (3456, 41)],
        "LMCache: imported": [(256, 20), (3456, 81)],
    }


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
    for name, of in {"load": LOAD, "restart": RESTART}.items():
        plot = VIEWS[name](of).plots[""]
        assert [row.ours for row in plot.rows] == [  # type: ignore[union-attr]
            "no sharing" not in row.label
            for row in plot.rows  # type: ignore[union-attr]
        ]
