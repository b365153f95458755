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
            "sent": 30,
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
        "traffic": {"seconds": 10, "prefixes": 24, "prefix_tokens": 256, "tail_tokens": 1},
        "blocks": 10,
        "repetitions": 3,
        "against": "plain-rr",
        "rates": {
            "1.0": ARMS,
            "3.0": {**ARMS, "offload-rr": {"errors": ["no GPU", "no GPU"]}},
            "9.0": ARMS,
        },
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
JOIN = [
    {"row": "coordinator-killed", "started, all replicas are whole": spread(442), **ORIGIN},
    {
        "row": "engine-joins", "entries": 1_000_000, "jitter_ms": JITTER,
        "it begins to join, its replica is whole": spread(530), **ORIGIN,
    },
]  # fmt: skip
NEAR_ONE = {"median": 1.01, "low": 0.98, "high": 1.04}
WAYS = ("computed", "local_hit", "decode", "exporting")
ENGINES = [
    {
        "starts": 3, "rounds": 12, "tokens": 3500,
        **{f"{one}_ms": {way: spread(30) for way in WAYS} for one in ("plain", "this", "alone")},
        "this_over_plain": dict.fromkeys(WAYS, NEAR_ONE) | {"decode": RATIO},
        "alone_over_plain": dict.fromkeys(WAYS, NEAR_ONE), **ORIGIN,
    }
]  # fmt: skip
USERS = {
    "seconds": 10,
    "users": 32,
    "prefixes": 4,
    "prefix_tokens": 512,
    "tail_tokens": 256,
    "answer_tokens": 64,
}
LOAD_USERS = [*LOAD[:-1], {**LOAD[-1], "traffic": USERS}]
LOAD_ENGINES = [*LOAD[:-1], {**LOAD[-1], "engines": 4}]
IMPORT_PEERS = [
    {
        **IMPORT[0],
        "imported": {"kvshm_over_lmcache": RATIO, "kvshm_over_offload": {}},
        "failed": {"offload": "RuntimeError: no GPU"},
    }
]
FIRST_TOKENS = [{**IMPORT[0], "starts": 3, "rounds": 30}]
LOOKED_UP = {
    "engines": 8, "blocks": 125_000,
    **{name: spread(3) for name in ("lookup", "planner", "leased", "cooled", "nobody has it")},
}  # fmt: skip
LOOKUP = [
    *({"keys": keys, **LOOKED_UP} for keys in (64, 512, 4096)),
    {
        "keys": 512,
        "engines": 8,
        "blocks": 125_000,
        "alone": spread(18),
        "beside_writer": spread(24),
        "written_per_second": 900_000,
        "p99_over_p50": 4.0,
        "two_over_one": 1.9,
        **ORIGIN,
    },
]
VISIBLE = {"all": spread(250), "first": spread(200), "last": spread(300), "never": 0}
EVENTS = [
    {"row": "visible", "subscribers": 8, "rare": VISIBLE, "rare_awaited": VISIBLE, "busy": VISIBLE},
    {
        "row": "coordinator",
        "engines": 16,
        "subscribers": 16,
        "cores": spread(0.3),
        "records_per_second": 160_000,
        **ORIGIN,
    },
]
SAID = {"sent": 600, "dropped": 200, "seconds": 2.0, "cores": 0.5, "equal_after_ms": 1234}
OVERLOAD = [
    {
        "engines": 16, "capacity": 300, "offered": 600, "lost": 77, "scans": 5,
        "trials": [{"offered": 300, "lost": 0, **SAID}], **SAID, **ORIGIN,
    }
]  # fmt: skip
CLIENT = [
    {
        "engines": 8, "hz": 1000.0, "records": 192, "blocks": 125_000,
        "records_per_second": 1.5e6, "records_heard_per_second": spread(1.25e6),
        "lost_percent": spread(1.4), "client_percent": spread(0.8),
        "lost_percent_quiet": spread(0.1), "wakeups_per_second": spread(20),
        "ns_per_record": spread(150), "known_ms": spread(80), **ORIGIN,
    }
]  # fmt: skip
STALLS = {when: spread(1) for when in ("alone", "applying", "growing")}
GROWTH = [
    {"entries": 4_000_000, "stall_ms": STALLS, "longest_ms": 4.5, "grown_ms": [1, 900], **ORIGIN}
]


WATCHED = {
    "none": {"engine": spread(0.5), "coordinator": spread(1.5)},
    "no page": {"engine": spread(0.5), "coordinator": spread(1.5), "console": spread(0.15)},
    "a page": {"engine": spread(0.5), "coordinator": spread(1.5), "console": spread(0.75)},
    "8 pages": {"engine": spread(0.75), "coordinator": spread(1.5), "console": spread(1.25)},
}
CONSOLE = [
    {
        "engines": 8,
        "rounds": 2,
        "percent": {
            a: o if a == "none" else {**o, "rss_mb": spread(30)} for a, o in WATCHED.items()
        },
        **ORIGIN,
    }
]


def copied(row: str, fragment: int, threads: int, share: float) -> dict[str, Any]:
    return {
        "row": row, "fragment": fragment, "threads": threads,
        "first_touch_gb_per_second": [{"first": 1.5, "second": 6}, {"first": 1.25, "second": 6}],
        "gb_per_second": {"memcpy": spread(8), "kvshm": spread(8 * share)},
        "share": {"kvshm": spread(share)}, **ORIGIN,
    }  # fmt: skip


COPY = [
    copied("16 KiB", 1 << 14, 1, 0.5),
    copied("64 KiB", 1 << 16, 1, 0.75),
    copied("64 KiB", 1 << 16, 2, 0.875),
    copied("groups", 1 << 16, 1, 0.95),
]
MOONCAKE = {"row": "mooncake", "fragment": 1 << 16, **ORIGIN}
COPY_PEERS = [
    *COPY,
    {**MOONCAKE, "gb_per_second": {"mooncake": spread(3)}},
    {**MOONCAKE, "failed": "it does not serve"},
]


def replayed(engines: int, mode: str, hit: float) -> dict[str, Any]:
    parts = {"core": {"apply": {"us_per_request": 10.0 * engines}}} if mode == "kvshm" else {}
    return {
        "engines": engines, "routing": "rr", "mode": mode, "requests": 1200, "hit": hit,
        "imported_bytes": 5e9, "first_token_s": spread(hit), "trace": "drawn",
        "unlimited_hit": 0.56, "node": {"blocks": 8192, "tokens_per_second": 60_000.0}, **parts,
    }  # fmt: skip


FOUND = {"alone": 0.25, "kvshm": 0.48, "ideal": 0.5}
COSTS = {
    "apply": {"exponent": 1.0, "points": [[1, 10.0], [4, 40.0]]},
    "lookup": {"exponent": None, "points": [[1, 3.0]]},
    "events received, bytes": {"exponent": 1.5, "points": [[1, 100], [4, 800]]},
}
TRACES = [
    *(replayed(1, mode, 0.5) for mode in FOUND),
    *(replayed(4, mode, hit) for mode, hit in FOUND.items()),
    {"benchmark": "traces_modes", "engines": 4, "routing": "rr", "hit": FOUND},
    {"benchmark": "traces_growth", "by": "engines", "costs": COSTS, **ORIGIN},
]
STEP = {"without": spread(1), "with": spread(2)}
LOOKS = {"benchmark": "weights", "all": spread(3), "step": STEP}
WEIGHTS = [
    {**LOOKS, "model": "small", "tensors": 704, "share_percent": 0.06, "samples": 170},
    {"benchmark": "calls", "more_ns": 200.0},
    {
        "benchmark": "start",
        "digest_gb_per_s": spread(8.0),
        "read_gb_per_s": spread(9.0),
        "digest_over_read": 0.89,
        "projected_s": {"1": 0.12, "70": 8.75},
        **ORIGIN,
    },
]


@pytest.mark.parametrize(
    ("name", "lines", "row"),
    [
        ("load-users", LOAD_USERS, "32 users begin with one of 4 prompts of 512 tokens, ask with"),
        ("load-engines", LOAD_ENGINES, "4 engines, each with room for 3 of 24 prefixes"),
        ("import-peers", IMPORT_PEERS, "imports take 1.04 [1.01, 1.08] of LMCache, at the median"),
        ("import-peers", IMPORT_PEERS, "| vLLM's offloading: failed: RuntimeError: no GPU |  |"),
        ("first-tokens", FIRST_TOKENS, "3 starts of 30 rounds."),
        ("lookup", LOOKUP, "| 4,096: cooled | 3.00 | 9.00 |"),
        ("lookup", LOOKUP, "| 512 hashes, by the planner (p50) | ≤ 20 µs | 3.00 µs | met |"),
        ("lookup", LOOKUP, "| beside a writer (p99), of the median without one | ≤ 3 times | 4.00"),
        ("events", EVENTS, "| a hundred a second: known to the last | 300 | 900 |"),
        ("events", EVENTS, "| all, ten a second (p99) | ≤ 3,000 µs | 750 µs | met |"),
        ("events", EVENTS, "| the coordinator (p50) | ≤ 1 cores | 0.300 cores | met |"),
        ("events-overload", OVERLOAD, "| 300 | 400 | 0 | 0.500 | 1,234 |"),
        ("events-overload", OVERLOAD, "77 of 600 records were lost"),
        ("client", CLIENT, "| lost to the GIL (p50) | ≤ 1 % | 0.800 % | met |"),
        ("client-crowd", CLIENT, "| ≥ 1,000,000 records/s | 1,250,000 records/s | met |"),
        ("growth", GROWTH, "| ≤ 5 ms | 4.50 ms | met |"),
        ("growth", GROWTH, "itself takes up to 900 ms"),
        ("console", CONSOLE, "| no console |  | 0.500 % (2.00) | 1.50 % (6.00) |  |"),
        (
            "console",
            CONSOLE,
            "| eight pages | 1.25 % (5.00) | 0.750 % (3.00) | 1.50 % (6.00) | 120",
        ),
        ("console", CONSOLE, "with one page (p50) | ≤ 1 % of a core | 0.750 % of a core | met |"),
        (
            "console",
            CONSOLE,
            "without a page (p50) | ≤ 0.1 % of a core | 0.150 % of a core | **missed",
        ),
        ("console", CONSOLE, "an engine took 0.500 % of a core without a console, 0.750 % with"),
        ("copy", COPY, "| 64 KiB, 2 threads | 8.00 | 7.00 (88 %) | 1.25 |"),
        ("copy", COPY, "| ≥ 0.9 of it | 0.750 of it | **missed**"),
        ("copy-peers", COPY_PEERS, "| Mooncake's client, 64 KiB: 3.00 |"),
        ("copy-peers", COPY_PEERS, "| Mooncake's client, 64 KiB: failed: it does not serve |"),
        ("traces", TRACES, "| 4 engines, round robin | 25.0 % | 48.0 % | 50.0 % | 96.0 % |"),
        ("traces", TRACES, "| ≥ 0.97 of it | 0.960 of it | **missed**"),
        ("traces", TRACES, "take 40 µs of a core for a request among 4 engines"),
        ("traces", TRACES, "with engines apply 1.00, events received, bytes 1.50."),
        ("traces-whole", TRACES, "1,200 requests. With unlimited room 56 % of"),
        ("weights", WEIGHTS, "at 8.00 GB/s on one core, which reads memory at 9.00 GB/s"),
        ("weights", WEIGHTS, "0.12 s for 1 GB, 8.75 s for 70 GB of a rank's"),
        ("weights", WEIGHTS, "costs 200 ns more"),
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
            "join",
            JOIN,
            "| it begins to join, its replica is whole (p50) | ≤ 1,000 ms | 530 ms | met",
        ),
        ("join", JOIN, "all replicas are whole (p50) | ≤ 1,000 ms | 442 ms | met |"),
        ("engines", ENGINES, "| 30.0 (90.0) | 1.04 [1.01, 1.08] | 1.01 [0.98, 1.04] |"),
        ("engines", ENGINES, "the highest of all | ≤ 1 times | 1.01 times | **missed**"),
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
    more = {VIEWS["load"]: ["rates"], VIEWS["import"]: ["lengths"], VIEWS["traces"]: ["engines"]}
    first = [] if name == "events-overload" else [name]
    assert [*found.plots] == [*first, *(f"{name}-{each}" for each in more.get(VIEWS[name], ()))]
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


def test_an_arm_that_is_past_saturation_is_not_compared_there() -> None:
    slow = {**ARMS, "kvshm-rr": {**ARMS["kvshm-rr"], "requests_per_second": measured(2.0)}}
    line = {**LOAD[-1], "rates": {"1.0": ARMS, "3.0": slow}}
    assert load([*LOAD[:-1], line]).values["rate"] == 1.0
    none = {**LOAD[-1], "rates": {"3.0": slow, "9.0": ARMS}}
    assert load([*LOAD[:-1], none]).values["rate"] == 3.0, "the lowest one, if there is none"


def test_lengths_are_those_of_all_prefixes() -> None:
    lengths = first_token(IMPORT).plots["lengths"]
    assert isinstance(lengths, Curves)
    assert lengths.series == {
        "computed": [(256, 1000), (3456, 1000)],
        "kvshm: imported": [(256, 10), (3456, 41)],
        "LMCache: imported": [(256, 20), (3456, 81)],
    }


def test_copies_are_drawn_over_the_size_of_fragments_with_one_thread() -> None:
    """Groups' and states' speed does not follow from that size, and a peer's row has one way."""
    curves = VIEWS["copy-peers"](COPY_PEERS).plots[""]
    assert isinstance(curves, Curves)
    assert curves.series == {
        "memcpy": [(16, 8), (64, 8)], "kvshm": [(16, 4), (64, 6)], "Mooncake's client": [(64, 3)],
    }  # fmt: skip


def test_costs_are_drawn_where_they_grow_with_something() -> None:
    curves = VIEWS["traces"](TRACES).plots["engines"]
    assert isinstance(curves, Curves)
    assert curves.series == {"apply (1.0)": [(1, 10.0), (4, 40.0)]}
    assert curves.log


def test_an_arm_that_always_failed_has_no_goodput() -> None:
    line = LOAD[-1]
    never = {"offload-rr": {"best": 0, "sustained": None}}
    told = load([*LOAD[:-1], {**line, "goodput": {**line["goodput"], **never}}]).values["goodput"]
    assert "kvshm, round robin 5.25" in told
    assert "offloading" not in told


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
