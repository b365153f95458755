"""The clients of a load test: they send what is due, choose the engine, and time every token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import NamedTuple

import aiohttp
from load_traffic import Conversation, Request, Router
from local_node import Engine

PATIENCE_SECONDS = 180.0


class Answer(NamedTuple):
    """What became of a request."""

    ttft_s: float
    """PATIENCE_SECONDS if it has failed."""
    failed: bool
    gaps_s: tuple[float, ...] = ()
    """Between each of its messages and the next one: tokens that come together are one message."""
    tokens: tuple[int, ...] = ()
    """If they were asked for."""


FAILED = Answer(PATIENCE_SECONDS, failed=True)


class Run(NamedTuple):
    """What became of a run's requests."""

    answers: list[Answer]
    seconds: float
    """From the first one's turn until the last answer."""


async def drive(
    engines: Sequence[Engine], requests: Iterator[Request], router: Router, tokens: int
) -> Run:
    """Send each request when it is due, whatever has become of the others.  ``tokens``: of each
    answer."""
    async with _clients(engines, router, tokens) as clients:
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                await asyncio.sleep(max(0.0, clients.began + request.at - time.monotonic()))
                tasks.create_task(clients.ask(request))
        return clients.run()


async def converse(
    engines: Sequence[Engine],
    conversations: Sequence[Conversation],
    router: Router,
    tokens: int,
    seconds: float,
) -> Run:
    """Have each user ask, wait for the answer and think, until ``seconds`` are over."""
    async with _clients(engines, router, tokens, wants_ids=True) as clients:

        async def talk(conversation: Conversation) -> None:
            request = next(conversation)
            while time.monotonic() + request.at < clients.began + seconds:
                await asyncio.sleep(request.at)
                request = conversation.send(list((await clients.ask(request)).tokens))

        async with asyncio.TaskGroup() as tasks:
            for each in conversations:
                tasks.create_task(talk(each))
        return clients.run()


class _Clients:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        engines: Sequence[Engine],
        router: Router,
        tokens: int,
        wants_ids: bool,
    ) -> None:
        self._session, self._engines, self._router = session, engines, router
        self._tokens, self._wants_ids = tokens, wants_ids
        self._busy, self._answers = [0] * len(engines), list[Answer]()
        self.began = time.monotonic()

    async def ask(self, request: Request) -> Answer:
        number = self._router(request.key, self._busy)
        self._busy[number] += 1
        engine, prompt = self._engines[number], request.prompt
        answer = await ask(self._session, engine, prompt, self._tokens, self._wants_ids)
        self._busy[number] -= 1
        self._answers.append(answer)
        return answer

    def run(self) -> Run:
        return Run(self._answers, time.monotonic() - self.began)


@asynccontextmanager
async def _clients(
    engines: Sequence[Engine], router: Router, tokens: int, wants_ids: bool = False
) -> AsyncIterator[_Clients]:
    async with open_session() as session:
        yield _Clients(session, engines, router, tokens, wants_ids)


def open_session() -> aiohttp.ClientSession:
    """Return a session without a limit of connections, for use as a context manager."""
    limits = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
    return aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0))


async def ask(
    session: aiohttp.ClientSession,
    engine: Engine,
    prompt: Sequence[int],
    tokens: int,
    wants_ids: bool = False,
) -> Answer:
    """Return what becomes of a request, once its last token has come or it has failed."""
    body = {
        "model": str(engine.spec.model),
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": wants_ids,
    }
    url, began = f"http://127.0.0.1:{engine.port}/v1/completions", time.monotonic()
    ids, at = list[int](), list[float]()
    with suppress(aiohttp.ClientError, TimeoutError):
        async with session.post(url, json=body) as answer:
            async for line in answer.content:
                if line.startswith(b'data: {"error"'):
                    return FAILED
                if line.startswith(b"data:") and b'"text"' in line:
                    at.append(time.monotonic())
                    ids += _ids(line) if wants_ids else ()
            if answer.status == 200 and at:
                gaps = (later - earlier for earlier, later in pairwise(at))
                return Answer(at[0] - began, False, tuple(gaps), tuple(ids))
    return FAILED


def _ids(line: bytes) -> list[int]:
    found = json.loads(line.removeprefix(b"data:"))["choices"][0]
    return found.get("token_ids") or []
