"""The load test's client: sends what is due whatever has become of the rest, and counts failures as
long waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise, repeat
from types import SimpleNamespace
from typing import Any

import bench_load
import pytest
from aiohttp import web
from bench_load import Row, at, compared, goodput, main, repetition, summary
from load_arms import why
from load_client import FAILED, PATIENCE_SECONDS, Answer, Run, converse, drive
from load_traffic import Clients, Request, Traffic, round_robin
from local_node import PromptTokens

GOOD, REFUSED, CUT_OFF, WITHOUT_TOKEN, ERROR_INSIDE = range(5)
"""First token of a prompt: what becomes of the request."""
TOKEN = b'data: {"choices": [{"text": "a", "token_ids": [65]}]}\n\n'
ERROR = b'data: {"error": {"message": "the engine has ended"}}\n\n'


@asynccontextmanager
async def served(answer: Any) -> Any:
    """An engine that answers so."""
    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        port = runner.addresses[0][1]
        yield SimpleNamespace(port=port, spec=SimpleNamespace(model="m"))
    finally:
        await runner.cleanup()


async def driven(kinds: list[int]) -> Run:
    """Drive a server that answers no request before all of them have come."""
    arrived, all_here = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal arrived
        arrived += 1
        if arrived == len(kinds):
            all_here.set()
        await all_here.wait()
        kind = (await request.json())["prompt"][0]
        if kind == REFUSED:
            return web.Response(status=500, body=TOKEN)
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"data: {}\n\n" if kind == WITHOUT_TOKEN else TOKEN)
        if kind == ERROR_INSIDE:
            await stream.write(ERROR)
        if kind == CUT_OFF:
            request.transport.abort()  # type: ignore[union-attr]  # it is connected
        return stream

    async with served(answer) as engine:
        requests = (Request(0.0, 0, [kind, 7]) for kind in kinds)
        return await drive([engine], requests, round_robin(), 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rates", "nan"], "--rates nan: not above 0"),
        (["--rates", "4,inf"], "--rates inf: not above 0"),
        (["--rates", "8,4"], "8,4: not from the lowest to the highest"),
        (["--rates", "0.4,40"], "--rates times --seconds: below 20, too few for percentiles"),
        (["--target-ms", "0"], "--target-ms 0.0: not above 0"),
        (["--answer-tokens", "1"], "--answer-tokens 1: no time between two tokens"),
        (["--users", "2", "--agents", "3"], "--agents and --users: only one of them"),
        (["--users", "2", "--blocks", "18"], "2304 tokens, a prompt has up to 2456"),
        (["--zipf", "nan"], "--zipf nan: not 0 or above"),
        (["--agents", "-3"], "--agents -3: not 0 or above"),
        (["--blocks", "5"], "--blocks 5: 640 tokens, a prompt has up to 2116"),
        (["--arms", "offload-sticky"], "offload-sticky: no arm; kinds: plain, kvshm, "),
        (["--against", "kvshm+keeper-rr"], "--against kvshm+keeper-rr: not one of the arms"),
        (["--arms", "plain-affinity,lmcache-rr"], "lmcache-rr needs --lmcache FOLDER"),
        (
            ["--arms", "plain-affinity,lmcache-rr", "--extra-gb", "1.5"],
            "--extra-gb 1.5: LMCache's server takes whole numbers only",
        ),
    ],
    ids=str,
)
def test_what_would_fail_after_minutes_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_load.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_requests_are_sent_when_due_and_failures_are_known() -> None:
    kinds = [GOOD, REFUSED, CUT_OFF, WITHOUT_TOKEN, GOOD, ERROR_INSIDE]
    run = asyncio.run(driven(kinds))
    assert sorted(answer.failed for answer in run.answers) == [False] * 2 + [True] * 4
    assert all(0 < a.ttft_s < PATIENCE_SECONDS for a in run.answers if not a.failed)


def test_users_ask_again_with_the_answer_and_every_token_is_timed() -> None:
    asked: list[list[int]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["prompt"])
        stream = web.StreamResponse()
        await stream.prepare(request)
        for _ in range(3):
            await stream.write(TOKEN)
            await asyncio.sleep(0.01)
        return stream

    async def talk() -> Run:
        run = Traffic(rate=50, seconds=1.0, prefixes=1, prefix_tokens=4, tail_tokens=2, users=1)
        users = Clients(run, 1).conversations(2)
        async with served(answer) as engine:
            return await converse([engine], users, round_robin(), 3, run.seconds)

    run = asyncio.run(talk())
    assert len(run.answers) == len(asked)
    assert all(len(each.gaps_s) == 2 and sum(each.gaps_s) > 0.015 for each in run.answers)
    grew = [(a, b) for a, b in pairwise(asked) if len(b) > len(a)]
    assert grew
    assert all(b[: len(a) + 3] == [*a, 65, 65, 65] and len(b) == len(a) + 5 for a, b in grew)


def test_a_failure_counts_as_the_longest_wait() -> None:
    answers = [Answer(0.1, False, (0.01, 0.03))] * 98 + [FAILED] * 2
    used = [PromptTokens(10, 20, 0), PromptTokens(0, 0, 70)]
    found = summary(Run(answers, 10.0), used, target_ms=100.0)
    assert (found["sent"], found["failed"], found["requests_per_second"]) == (100, 2, 9.8)
    assert (found["ttft_ms"]["p50"], found["ttft_ms"]["p90"]) == (100.0, 100.0)
    assert found["ttft_ms"]["p99"] == 1000 * PATIENCE_SECONDS
    assert (found["inter_token_ms"]["p50"], found["inter_token_ms"]["p99"]) == (20.0, 30.0)
    assert (found["within_target_percent"], found["within_target_per_second"]) == (98.0, 9.8)
    assert found["percent_of_tokens"] == {"computed": 10.0, "local": 20.0, "imported": 70.0}
    slower = summary(Run(answers, 10.0), used, target_ms=99.0)
    assert (slower["within_target_percent"], slower["within_target_per_second"]) == (0.0, 0.0)
    nothing = summary(Run([FAILED] * 20, 10.0), used, target_ms=99.0)
    assert nothing == {"error": "20 of 20 requests have failed"}


# -- all runs


def result(p50: float, percent: float = 100.0, per_second: float = 1.0) -> dict[str, Any]:
    times = {"p50": p50, "p90": 2 * p50, "p99": 3 * p50}
    return {
        "requests_per_second": 2.0,
        "within_target_percent": percent,
        "within_target_per_second": per_second,
        "ttft_ms": times,
        "inter_token_ms": times,
    }


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("usage: a\nlmcache server: error: argument --l1: invalid", "lmcache server: error: arg"),
        ("it has ended:\nERROR 1 [w.py:3] a.B.OddError: no room\nand so on", "a.B.OddError: no"),
        ("it has ended: status 3", "it has ended: status 3"),
    ],
)
def test_the_line_that_names_the_cause_of_a_failure_is_found(said: str, named: str) -> None:
    assert why(RuntimeError(said)).startswith(named)


def test_a_repetition_that_failed_is_kept_and_not_compared() -> None:
    broken = {"error": "Exception: no GPU"}
    rows = [
        Row(0, "a", 4.0, result(10.0)), Row(0, "a", 8.0, result(99.0)), Row(0, "b", 4.0, broken),
        Row(1, "a", 4.0, result(20.0)), Row(1, "b", 4.0, result(30.0)),
    ]  # fmt: skip
    found = compared(at(rows, 4.0), "a")
    assert found["a"]["ttft_p90_ms"]["median"] == 30.0
    assert found["b"]["errors"] == ["Exception: no GPU"]
    assert found["b"]["inter_token_p99_ms"]["median"] == 90.0
    assert found["b"]["ttft_p50_ms"]["over"]["median"] == 1.5
    assert "errors" not in found["a"]
    never = compared({"a": [result(1.0)], "b": [broken]}, "b")
    assert never["b"] == {"errors": ["Exception: no GPU"]}
    assert never["a"]["ttft_p50_ms"] == {"median": 1.0, "over": None}


@pytest.mark.parametrize(
    ("percents", "sustained", "best"),
    [
        ((100, 95, 40), 8.0, 7.6),
        ((100, 89, 95), 4.0, 15.2),
        ((80, 95, 95), None, 15.2),
        ((100, 100, 100), 16.0, 16.0),
    ],
)
def test_goodput_is_the_highest_rate_up_to_which_the_target_is_met(
    percents: tuple[int, ...], sustained: float | None, best: float
) -> None:
    rates = (4.0, 8.0, 16.0)
    good = [
        Row(n, "a", rate, result(1.0, percent, rate * percent / 100))
        for n in range(2)
        for rate, percent in zip(rates, percents, strict=True)
    ]
    assert goodput(good, "a") == {"best": best, "sustained": sustained}
    failed = [Row(n, "a", rate, {"error": "it"}) for n in (2, 3, 4) for rate in rates]
    assert goodput([*good, *failed], "a") == {"best": 0.0, "sustained": None}


def test_what_an_arm_has_measured_before_it_breaks_off_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def started(kind: Any, setting: Any) -> Iterator[Any]:
        if kind.offloads:
            raise RuntimeError(
                "<Engine> does not serve\n(A pid=1) WARNING 1 [os.py:2] causes `OSError: files`\n"
                "(W pid=2) ERROR 1 [w.py:3]     raise Exception(\n"
                "(W pid=2) ERROR 1 [w.py:3] Exception: no GPU\nRuntimeError: See the cause above.\n"
            )
        yield None, [kind], None

    def run_arm(engines: Any, *_: Any) -> Iterator[dict[str, Any]]:
        yield result(1.0)
        if engines[0].shares:
            raise ConnectionRefusedError("gone")
        yield from repeat(result(2.0), 2)

    monkeypatch.setattr(bench_load, "started", started)
    monkeypatch.setattr(bench_load, "run_arm", run_arm)
    setting: Any = None
    runs = [Traffic(rate, 9.0) for rate in (1.0, 2.0, 3.0)]
    rows = list(repetition(0, ["plain-rr", "kvshm-rr", "offload-rr"], setting, runs, 500.0))
    assert {(row.arm, row.rate) for row in rows} == {
        (arm, rate) for arm in ("plain-rr", "kvshm-rr", "offload-rr") for rate in (1.0, 2.0, 3.0)
    }
    said = {
        arm: [row.result.get("error") for row in rows if row.arm == arm]
        for arm in ("plain-rr", "kvshm-rr", "offload-rr")
    }
    assert said["plain-rr"] == [None, None, None]
    assert said["kvshm-rr"] == [None, "gone", "gone"]
    assert said["offload-rr"] == ["Exception: no GPU"] * 3


def test_every_run_and_all_of_them_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def repeated(number: int, arms: Any, *_: Any) -> Iterator[Row]:
        yield from (Row(number, arm, rate, result(5.0)) for arm in arms for rate in (4.0, 8.0))

    monkeypatch.setattr(bench_load, "repetition", repeated)
    monkeypatch.setattr(bench_load, "write_model", lambda path: path)
    monkeypatch.setattr("sys.argv", ["bench_load.py", "--rates", "4,8", "--repetitions", "2"])
    main()
    *runs, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(runs) == 4 * 2 * 2
    assert {run["benchmark"] for run in runs} == {"load_run"}
    assert runs[0]["ttft_ms"]["p90"] == 10.0
    assert whole["benchmark"] == "load"
    assert whole["rates"]["8.0"]["kvshm-rr"]["ttft_p90_ms"]["over"]["median"] == 1.0
    assert whole["goodput"]["kvshm-least"] == {"best": 1.0, "sustained": 8.0}
