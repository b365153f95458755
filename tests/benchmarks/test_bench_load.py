"""The load test's client: sends what is due whatever has become of the rest, and counts failures as
long waits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from bench_load import PATIENCE_SECONDS, Answer, Run, drive, main, summary
from load_traffic import Request, round_robin
from local_node import PromptTokens

GOOD, REFUSED, CUT_OFF, WITHOUT_TOKEN = range(4)
"""First token of a prompt: what becomes of the request."""
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'


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
        if kind == CUT_OFF:
            request.transport.abort()  # type: ignore[union-attr]  # it is connected
        return stream

    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    engine: Any = SimpleNamespace(port=port, spec=SimpleNamespace(model="m"))
    try:
        requests = (Request(0.0, 0, [kind, 7]) for kind in kinds)
        return await drive([engine], requests, round_robin())
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "nan"], "--rate nan: not above 0"),
        (["--rate", "inf"], "--rate inf: not above 0"),
        (["--zipf", "nan"], "--zipf nan: not 0 or above"),
        (["--agents", "-3"], "--agents -3: not 0 or above"),
        (["--blocks", "5"], "--blocks 5: 640 tokens, a prompt has up to 2116"),
        (["--plot", "load.nonsense"], "name a file that ends in one of"),
        (["--plot", "/nonexistent/load.svg"], "no file can be written there"),
    ],
    ids=str,
)
def test_what_would_fail_after_minutes_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    if "nonsense" in arguments[-1]:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr("sys.argv", ["bench_load.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_requests_are_sent_when_due_and_failures_are_known() -> None:
    kinds = [GOOD, REFUSED, CUT_OFF, WITHOUT_TOKEN, GOOD]
    run = asyncio.run(driven(kinds))
    assert sorted(answer.failed for answer in run.answers) == [False, False, True, True, True]
    assert all(0 < a.ttft_s < PATIENCE_SECONDS for a in run.answers if not a.failed)


def test_a_failure_counts_as_the_longest_wait() -> None:
    answers = [Answer(0.1, failed=False)] * 98 + [Answer(PATIENCE_SECONDS, failed=True)] * 2
    found = summary(Run(answers, 10.0), [PromptTokens(10, 20, 0), PromptTokens(0, 0, 70)])
    assert (found["sent"], found["failed"], found["requests_per_second"]) == (100, 2, 9.8)
    assert (found["ttft_p50_ms"], found["ttft_p90_ms"]) == (100.0, 100.0)
    assert found["ttft_p99_ms"] == 1000 * PATIENCE_SECONDS
    assert found["percent_of_tokens"] == {"computed": 10.0, "local": 20.0, "imported": 70.0}
