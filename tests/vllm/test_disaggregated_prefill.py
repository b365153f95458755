"""The example for disaggregated prefill on real engines: the decode engine computes nothing that
the prefill engine has computed, and goes on when that one is killed."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from completions import Result, stream
from disaggregated_prefill.__main__ import proxy
from local_node import Engine, EngineSpec, free_port, wait_until
from sharing_node import BLOCK_SIZE, observe

from .conftest import Pair

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

BLOCKS = 6
LENGTH = BLOCKS * BLOCK_SIZE + 40
REQUESTS = 6
TOKENS = 16


class Client:
    """Asks the proxy."""

    def __init__(self, port: int, model: Path) -> None:
        self.port, self._model = port, {"model": str(model)}

    def complete(self, prompt: list[int]) -> Result:
        body = {"prompt": prompt, "logprobs": 5, "max_tokens": TOKENS}
        return stream(self.port, "/v1/completions", {**self._model, **body})

    def chat(self, text: str) -> Result:
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "logprobs": True, "top_logprobs": 5, "max_tokens": TOKENS}
        return stream(self.port, "/v1/chat/completions", {**self._model, **body})


@pytest.fixture
def client(pair: Pair, model: Path, tmp_path: Path) -> Iterator[Client]:
    port = free_port()
    with proxy([pair.a], [pair.b], port, tmp_path / "proxy.log"):
        yield Client(port, model)


def prompts(seed: int, count: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(10, 600) for _ in range(LENGTH)] for _ in range(count)]


def test_each_prompt_is_imported_and_answered_as_on_a_local_hit(pair: Pair, client: Client) -> None:
    for prompt in prompts(4101, REQUESTS):  # one after the other: none may be a miss
        with observe(pair.node, pair.b) as seen:
            answer = client.complete(prompt)
        seen.assert_imported(BLOCKS)
        assert answer == pair.a.complete(prompt, max_tokens=TOKENS)


def test_none_of_many_at_a_time_is_a_miss(pair: Pair, client: Client) -> None:
    with observe(pair.node, pair.b) as seen, ThreadPoolExecutor(4) as pool:
        list(pool.map(client.complete, prompts(4102, 2 * REQUESTS)))
    seen.assert_imported(2 * REQUESTS * BLOCKS)


def test_a_chat_is_imported(pair: Pair, client: Client) -> None:
    words = " ".join(f"{a}{b}" for a in "abcdefghijklmnopqrst" for b in "aeiouxyzkm")
    with observe(pair.node, pair.b) as seen:
        answer = client.chat(words)
    seen.assert_imported(answer.prompt_tokens // BLOCK_SIZE)


@pytest.mark.nightly
def test_one_prefills_for_two_and_two_for_one(pair: Pair, model: Path, tmp_path: Path) -> None:
    (third,) = pair.node.start_engines(EngineSpec("third", model, core=0, num_blocks=256))
    a, b = pair.a, pair.b
    try:
        pair.node.wait_joined(a, b, third)
        for seed, prefill, decode in ((4104, [a], [b, third]), (4105, [a, third], [b])):
            port = free_port()
            with proxy(prefill, decode, port, tmp_path / "proxy.log"), ExitStack() as observed:
                seen = [observed.enter_context(observe(pair.node, each)) for each in decode]
                client = Client(port, model)
                sent = prompts(seed, REQUESTS)
                answers = [client.complete(prompt) for prompt in sent]
                observed.close()
            for each in seen:
                each.assert_imported(REQUESTS * BLOCKS // len(decode))
            # Each engine of a kind in turn: of two, the first has computed every other prompt.
            local = [prefill[i % len(prefill)] for i in range(REQUESTS)]
            hits = [e.complete(p, max_tokens=TOKENS) for e, p in zip(local, sent, strict=True)]
            assert answers == hits
    finally:
        pair.node.stop_engines(third)


def test_answers_go_on_when_the_prefill_engine_is_killed(
    pair: Pair, model: Path, tmp_path: Path
) -> None:
    """In the middle of a request: it has the prompt, and has not answered."""
    (doomed,) = pair.node.start_engines(EngineSpec("doomed", model, core=0, num_blocks=256))
    try:
        pair.node.wait_joined(doomed, pair.b)
        port = free_port()
        with proxy([doomed], [pair.b], port, tmp_path / "proxy.log"):
            client = Client(port, model)
            first, second, third = prompts(4103, 3)
            with observe(pair.node, pair.b) as seen:
                client.complete(first)
            seen.assert_imported(BLOCKS)
            with observe(pair.node, pair.b) as seen, ThreadPoolExecutor(1) as pool:
                doomed.signal(signal.SIGSTOP)
                answer = pool.submit(client.complete, second)
                _wait_for_connection(doomed)
                doomed.kill()
                assert len(answer.result().tokens) == TOKENS
            assert seen.tokens.computed == LENGTH
            assert len(client.complete(third).tokens) == TOKENS
    finally:
        pair.node.stop_engines(doomed)


def _wait_for_connection(engine: Engine) -> None:
    """Until the stopped engine's kernel has a connection with bytes that it has not read."""
    port = f":{engine.port:04X}"
    for _ in wait_until("the proxy asks the stopped engine", 100):
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(r[1].endswith(port) and int(r[4].split(":")[1], 16) and r[3] == "01" for r in rows):
            break
