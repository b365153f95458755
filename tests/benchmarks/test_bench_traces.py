"""The replay of a trace finds what an independent simulator finds, and its arithmetic is right."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import bench_traces
import pytest
from bench_traces import Node, Run, differences, exponent, replay, side_by_side, summary
from trace_replay import Found, Played, prefix_aware, round_robin, sticky
from trace_requests import Hashes, Request, draw, read, unlimited_hits

NODE = Node(640, 60_000.0, 131_072, 50.0, 3.0, 20.0)
"""So small that blocks are handed out again all the time."""
LINE = {"timestamp": 3, "input_length": 1030, "output_length": 7, "hash_ids": [0, 5, 6]}


def requests(count: int = 200) -> list[Request]:
    """A drawn trace without the few longest prompts, in which some prompts end with a full block,
    and are asked once more later."""
    drawn = [r for r in islice(draw(3.4), 2 * count) if len(r.ids) < 60][:count]
    for number, request in enumerate(drawn):
        of = drawn[number - 33] if number % 5 == 4 and number > 33 else request
        tokens = 512 * len(of.ids) if number % 5 in (1, 4) else of.tokens
        drawn[number] = request._replace(number=number, ids=of.ids, tokens=tokens)
    return drawn


@pytest.mark.parametrize("routing", ["rr", "sticky", "prefix"])
@pytest.mark.parametrize("mode", bench_traces.CHECKED)
def test_the_independent_simulator_finds_the_same(mode: str, routing: str) -> None:
    pytest.importorskip("vllm")
    asked = requests()
    for engines, split in ((4, 1), (3, 4)):
        run = Run(engines, routing, mode, split)
        played, _ = replay(run, NODE, asked)
        assert not differences(run, NODE, asked, played)
        found = summary(played, 512 // split, 1)
        assert 0 < found["hit"] < unlimited_hits(asked)  # what was drawn is not trivial
        assert mode == "order" or not found["imported"]
        assert (mode, routing) != ("order", "rr") or found["imported"]


def test_a_difference_is_noticed() -> None:
    pytest.importorskip("vllm")
    asked, run = requests(60), Run(2, "rr", "alone")
    played, _ = replay(run, NODE, asked)
    played.found[40] = Found(played.found[40].local + 1, 0)
    played.first_token_ns[50] += 1
    assert len(differences(run, NODE, asked, played)) == 2


def test_sharing_as_by_default_reaches_one_cache_and_says_what_it_costs() -> None:
    """Events come late here and duplicates go first, so that nothing has to be equal."""
    pytest.importorskip("vllm")
    asked = requests()
    hits: dict[str, float] = {}
    for mode in ("alone", "kvshm", "ideal"):
        played, costs = replay(Run(4, "rr", mode), NODE, asked)
        hits[mode] = summary(played, 512, 1)["hit"]
        assert bool(costs) == (mode == "kvshm")
        if mode == "kvshm":
            assert costs["core"]["lookup"]["calls"] == len(asked)
            assert {"send", "coordinator", "apply", "publish", "retract"} <= costs["core"].keys()
            traffic = costs["events"]
            assert traffic["applied"] == 3 * traffic["records"] > 0
            assert traffic["received_bytes"] > 3 * 48 * traffic["records"]
            assert costs["entries"] > 300
    assert hits["alone"] < 0.9 * hits["kvshm"]
    assert hits["kvshm"] > 0.85 * hits["ideal"]


def test_the_program_prints_what_the_page_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    small = ["--requests", "40", "--blocks", "2048", "--engines", "1", "2", "4"]
    few = ["--routing", "rr", "--splits", "1", "2", "--split-requests", "20", "--check"]
    monkeypatch.setattr("sys.argv", ["bench_traces.py", *small, *few])
    bench_traces.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_kind.setdefault(line["benchmark"], []).append(line)
    assert len(by_kind["traces"]) == 3 * 4
    assert all(line["requests"] == 40 for line in by_kind["traces"])
    assert sum(line.get("checked", 0) for line in by_kind["traces"]) == 3 * 3 * 40
    assert [line["engines"] for line in by_kind["traces_modes"]] == [1, 2, 4]
    engines, blocks = by_kind["traces_growth"]
    assert [x for x, _ in engines["costs"]["apply"]["points"]] == [2, 4]
    assert [x for x, _ in blocks["costs"]["apply"]["points"]] == [2048, 4096]
    assert isinstance(blocks["costs"]["publish"]["exponent"], float)


# -- arithmetic


def test_shares_are_of_prompt_tokens() -> None:
    asked = [Request(0, 0, 1000, 1, (0, 1)), Request(1, 0, 3000, 1, (0, 1, 2, 3, 4, 5))]
    played = Played(asked, [Found(0, 1), Found(2, 1, 4)], [10**9, 3 * 10**9], [0, 1])
    found = summary(played, 500, 2)
    assert (found["hit"], found["imported"], found["lost"]) == (0.5, 0.25, 0.5)
    assert found["imported_bytes"] == 2000
    assert found["first_token_s"]["p50"] == 2


def test_what_of_the_ideal_is_reached() -> None:
    times = {"first_token_s": {}}
    by_mode = {"alone": {"hit": 0.1, **times}, "ideal": {"hit": 0.2, **times}}
    assert side_by_side(by_mode)["alone_of_ideal"] == 0.5


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    assert exponent([(2, 20), (4, 80), (8, 320)]) == 2
    assert exponent([(2, 7), (4, 7)]) == 0
    assert exponent([(2, 7)]) is exponent([(2, 7), (2, 9)]) is None


def test_routers() -> None:
    def alike(_: int) -> int:
        return 1

    one = Request(5, 0, 3000, 1, (0, 8, 9))
    assert round_robin(one, [0] * 4, alike) == 1
    assert sticky(one, [9, 0], alike) == sticky(one._replace(number=6), [0, 9], alike)
    cached = [1, 3, 2, 1]
    assert prefix_aware(one, [0, 2, 0, 0], cached.__getitem__) == 1
    assert prefix_aware(one, [0, 3, 0, 0], cached.__getitem__) == 2  # the other has too much to do
    assert prefix_aware(one, [1, 0, 1, 1], alike) == 1
    turns = {prefix_aware(one._replace(number=n), [0] * 4, alike) for n in range(4)}
    assert turns == {0, 1, 2, 3}


# -- traces and options


def test_a_trace_is_read() -> None:
    (one,) = read([json.dumps(LINE)])
    assert one == Request(0, 3_000_000, 1030, 7, (0, 5, 6))
    assert (one.session, one.cacheable(512)) == (5, 2)
    hashes = Hashes(2).of(one)
    assert len(hashes) == len(set(hashes)) == 4
    assert Hashes(2).of(one._replace(ids=(0, 5, 7))) == hashes


@pytest.mark.parametrize(
    "line",
    ["", "[]", json.dumps({"timestamp": 1}), json.dumps({**LINE, "input_length": 1536 + 512})],
)
def test_what_is_no_trace_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        list(read([line]))


def test_a_drawn_trace_has_conversations_and_the_published_form() -> None:
    drawn = list(islice(draw(3.4), 2000))
    assert 500 < drawn[-1].at_ns / 1e9 < 700
    assert all(r.tokens // 512 <= len(r.ids) <= -(-r.tokens // 512) for r in drawn)
    assert {r.ids[0] for r in drawn} == {0}
    assert 0.2 < unlimited_hits(drawn) < 0.8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engines", "29"], "--engines 29: a whole number from 1 to 28"),
        (["--splits", "3"], "--splits 3: does not divide 512"),
        (["--rate", "0"], "0: not above 0"),
        (["--requests", "1"], "--requests 1: a whole number from 2"),
        (["--trace", "no-such-file"], "no-such-file"),
        (["--blocks", "64"], "of an engine: more --blocks"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_traces.py", *arguments])
    monkeypatch.setattr(bench_traces, "replay", lambda *_: pytest.fail("it runs"))
    with pytest.raises(SystemExit) as ended:
        bench_traces.main()
    assert said in f"{ended.value} {capsys.readouterr().err}"


def test_a_file_that_is_no_trace_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    path.write_text("{}\n")
    monkeypatch.setattr("sys.argv", ["bench_traces.py", "--trace", str(path)])
    with pytest.raises(SystemExit, match="line 1 is no request"):
        bench_traces.main()
