"""Whatever clients send over HTTP is answered as a local hit is, or refused, and nothing of it is
left in either engine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import pytest
from local_node import Engine, wait_until
from sharing_node import BLOCK_SIZE, observe

from .conftest import Pair
from .engines import PATIENCE_S, lines_naming_kvshm
from .odd_texts import HALVES, MISTAKEN, TEXTS, UNDERSTOOD
from .oracle import Prompt, random_prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,  # test_odd_ids.py, test_request_options.py: without engines
    pytest.mark.timeout(900),
]

BLOCKS = 3
WAYS: dict[str, dict[str, Any]] = {
    "at once": {"temperature": 0},
    # vLLM may not draw a token of such a request twice: no step waits for its import.
    "asynchronous": {"temperature": 1.0, "seed": 5},
}
SEEDS = count(9000)
SALTS = {
    name: text for name, text in TEXTS.items() if 0 < len(text) <= 128 and not {*"\0/@\\"} & {*text}
}
"""Those that vLLM takes."""


class Answer(NamedTuple):
    """What a server has said."""

    status: int
    said: Any

    @property
    def tokens(self) -> Any:
        """Tokens and log-probabilities of a completion."""
        assert self.status == 200, self
        choice = self.said["choices"][0]
        return choice["token_ids"], choice["logprobs"]["top_logprobs"]


def body(engine: Engine, prompt: Prompt, **options: Any) -> bytes:
    reported = {"model": str(engine.spec.model), "prompt": list(prompt), "max_tokens": 4}
    reported |= {"logprobs": 3, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return json.dumps({**reported, "ignore_eos": True, "temperature": 0, **options}).encode()


def ask(
    engine: Engine, prompt: Prompt, headers: Mapping[str, str] | None = None, **options: Any
) -> Answer:
    return post(engine, body(engine, prompt, **options), headers)


def post(engine: Engine, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=PATIENCE_S)
    try:
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request("POST", "/v1/completions", body, sent)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    return Answer(answer.status, json.loads(text))


@dataclass
class Exchange:
    """Engine ``a`` computes prompts, ``b`` is asked for them, and ``a`` hits its own."""

    a: Engine
    b: Engine
    pair: Pair

    def computed(self, *salts: str | None) -> dict[Prompt, Answer]:
        """Prompts that ``a`` has computed, with these salts, and ``b`` knows of."""
        made = [random_prompt(next(SEEDS), BLOCKS * BLOCK_SIZE + 20) for _ in salts]
        with self.pair.node.sharing(self.a, BLOCKS * len(made)):
            asked = zip(made, salts, strict=True)
            return {prompt: ask(self.a, prompt, cache_salt=salt) for prompt, salt in asked}

    def check(self, sent: Mapping[str, Mapping[str, Any]], **how: Any) -> None:
        """Ask ``b`` with what is ``sent``, each with a prompt of its own: it imports all, and each
        answer equals the local hit."""
        prompts = [*self.computed(*(options.get("cache_salt") for options in sent.values()))]
        asked = [*zip(sent.items(), prompts, strict=True)]
        with observe(self.pair.node, self.b) as seen:
            answers = [ask(self.b, prompt, **options, **how) for (_, options), prompt in asked]
        for ((name, options), prompt), answer in zip(asked, answers, strict=True):
            salt = options.get("cache_salt")
            assert answer.tokens == ask(self.a, prompt, cache_salt=salt, **how).tokens, name
        assert seen.imported_blocks == BLOCKS * len(sent)
        if how == WAYS["asynchronous"]:
            assert seen.loads_at_once == 0


@pytest.fixture
def exchange(pair: Pair) -> Iterator[Exchange]:
    """Afterwards both engines answer as before, and nothing is left in them."""
    yield Exchange(pair.a, pair.b, pair)
    for engine in (pair.a, pair.b):
        assert ask(engine, random_prompt(next(SEEDS), BLOCK_SIZE)).status == 200
        for _ in wait_until(f"nothing is left in {engine!r}", PATIENCE_S):
            if not in_use(engine):
                break
        counted = pair.node.counted(engine)
        assert (counted["hook_errors"], counted["loads_lost"]) == (0, 0)
        assert all(line.isprintable() for line in lines_naming_kvshm(engine.log()))


def in_use(engine: Engine) -> dict[str, float]:
    """What vLLM says of blocks and requests that are not done."""
    names = ("kv_cache_usage_perc{", "num_requests_running{", "num_requests_waiting{", "kv_fetch")
    seen = engine.metrics().items()
    return {name: value for name, value in seen if value and any(each in name for each in names)}


@pytest.mark.parametrize("way", WAYS)
def test_any_id(exchange: Exchange, way: str) -> None:
    exchange.check({name: {"request_id": text} for name, text in TEXTS.items()}, **WAYS[way])


def test_ids_of_headers(exchange: Exchange) -> None:
    """A header holds no NUL and no line's end."""
    ids = {"latin-1": "\xe9\xff", "formats": "%s{}", "long": "x" * 60_000, "blanks": " a\t"}
    exchange.check({name: {"headers": {"X-Request-Id": text}} for name, text in ids.items()})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", ["job\x007", "usual"])
def test_one_id_of_many_requests(exchange: Exchange, way: str, text: str) -> None:
    """Of some that run at once, and of some that have ended."""
    prompts = [*exchange.computed(*[None] * 4)]
    with observe(exchange.pair.node, exchange.b) as seen, ThreadPoolExecutor(8) as threads:

        def asked(prompt: Prompt) -> Answer:
            return ask(exchange.b, prompt, request_id=text, **WAYS[way])

        answers = [*threads.map(asked, prompts * 3)]
    assert {answer.status for answer in answers} == {200}
    assert seen.imported_blocks == BLOCKS * len(prompts)


def test_clients_that_hang_up(exchange: Exchange) -> None:
    """In the middle of asynchronous imports, most of them."""
    for prompt in exchange.computed(*[None] * 8):
        more = {"request_id": "job\x007", "max_tokens": 500, **WAYS["asynchronous"]}
        connection = http.client.HTTPConnection("127.0.0.1", exchange.b.port)
        sent = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body(exchange.b, prompt, **more), sent)
        connection.close()


def test_any_salt(exchange: Exchange) -> None:
    exchange.check({name: {"cache_salt": text} for name, text in SALTS.items()})
    (prompt,) = exchange.computed("a")
    with observe(exchange.pair.node, exchange.b) as seen:
        for salt in ("aa", "a ", "a%s", None):
            assert ask(exchange.b, prompt, cache_salt=salt).status == 200
    assert seen.imported_blocks == 0


def test_any_options(exchange: Exchange) -> None:
    sent = {name: {"kv_transfer_params": options} for name, options in UNDERSTOOD.items()}
    sent |= {f"hint {name}": {"kv_hints": options} for name, options in UNDERSTOOD.items()}
    texts = {name: text for name, text in TEXTS.items() if "kvshm" not in text}
    sent |= {f"args {name}": {"vllm_xargs": {text: text}} for name, text in texts.items()}
    exchange.check(sent)
    computed = exchange.computed(*[None] * len(MISTAKEN))
    with observe(exchange.pair.node, exchange.b) as seen:
        for options, (prompt, own) in zip(MISTAKEN.values(), computed.items(), strict=True):
            assert ask(exchange.b, prompt, kv_transfer_params=options).tokens == own.tokens
    assert (seen.imported_blocks, seen.bad_options) == (0, len(MISTAKEN))


def test_what_vllm_refuses(exchange: Exchange) -> None:
    """Half a character ends a request of vLLM's before kvshm hears of it, with status 500 where
    nothing checks for it."""
    (prompt,) = exchange.computed(None)
    odd = {**TEXTS, **HALVES}
    for text in odd.values():
        assert ask(exchange.b, prompt, model=text or "?").status in (400, 404)
    for text in {*odd.values()} - {*SALTS.values()}:
        assert ask(exchange.b, prompt, cache_salt=text).status == 400
    for text in HALVES.values():
        assert ask(exchange.b, prompt, request_id=text).status >= 400
        assert ask(exchange.b, prompt, vllm_xargs={text: text}).status >= 400
    for shape in ([], "kvshm", 7, [{"kvshm": {}}]):
        assert ask(exchange.b, prompt, kv_transfer_params=shape).status == 400
        assert ask(exchange.b, prompt, vllm_xargs={"a": {"kvshm": shape}}).status == 400
    whole = body(exchange.b, prompt, request_id="\0")
    for wrong in (b"", b"{", whole[:-1], whole.replace(b"\\u0000", b"\0"), b"\xff" + whole):
        assert post(exchange.b, wrong).status == 400
