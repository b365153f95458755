"""``kvshm verify-logits``: does an imported prefix give the answer that a local hit gives?

Of two servers of one model A computes a prompt and then hits it in its own cache; B imports it from
A and then hits it.  What A computed may differ in last bits (docs/fingerprint.md) and decides
nothing; the three other answers have to agree.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any

from .exchange import exchange
from .options import number
from .output import note, show

HELP = "ask two engines the same prompt and compare the answers"
EXIT_AGREE, EXIT_DIFFER, EXIT_FAILED, EXIT_NOT_IMPORTED = range(4)
IMPORTED = "vllm:kvshm_imported_tokens_total"
_COUNTED = re.compile(rf"^{IMPORTED}(?:\{{.*\}})? +(\S+)", re.MULTILINE)
_ODD_ANSWER = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
METRICS_SECONDS = 10.0
_POLL_SECONDS = 0.1
MOST = 1e6
"""Of any number on the command line: longer pauses overflow."""
NAMES = ("A computed", "A local hit", "B imported", "B local hit")
JUDGED = (("A local hit", "B imported"), ("B imported", "B local hit"))


class ServerError(Exception):
    """A server cannot be asked, or its answer cannot be used."""


@dataclass(frozen=True)
class Asked:
    model: str
    prompt: str
    max_tokens: int
    logprobs: int
    salt: str


@dataclass(frozen=True)
class Answer:
    tokens: list[str]
    logprobs: list[float]
    """Of the chosen tokens."""
    top: list[dict[str, float]]


@dataclass(frozen=True)
class Divergence:
    first_token: int | None
    """Its index, of those that differ."""
    max_logprob: float
    """Up to the first token that differs; infinite for a NaN.  One that only one side states
    differs by how far it is above the least of the other side."""
    unmatched: int
    """Tokens that only one side has among the most probable, up to there."""

    def within(self, tolerance: float) -> bool:
        matched = not self.unmatched or tolerance > 0
        return self.first_token is None and matched and self.max_logprob <= tolerance


def divergence(a: Answer, b: Answer) -> Divergence:
    """Compare two answers up to the first token that differs, whose candidates count too."""
    pairs = list(zip(a.tokens, b.tokens, strict=False))
    first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if first is None and len(a.tokens) != len(b.tokens):
        first = len(pairs)
    end = len(pairs) if first is None else min(first + 1, len(pairs))
    deltas, unmatched = [0.0], 0
    for place in range(end):
        if a.tokens[place] == b.tokens[place]:
            deltas.append(_apart(a.logprobs[place], b.logprobs[place]))
        here, there = a.top[place], b.top[place]
        deltas += [_apart(here[token], there[token]) for token in here.keys() & there.keys()]
        for one, other in ((here, there), (there, here)):
            least = min(other.values(), default=-math.inf)
            alone = [one[token] for token in one.keys() - other.keys()]
            deltas += [_apart(max(each, least), least) for each in alone]
            unmatched += len(alone)
    return Divergence(first, max(deltas), unmatched)


def _apart(x: float, y: float) -> float:
    """How far two log-probabilities are apart; a NaN is infinitely far from all."""
    if math.isnan(x) or math.isnan(y):
        return math.inf
    return 0.0 if x == y else abs(x - y)  # equal infinities have no difference


# -- asking


class Server:
    """An OpenAI-compatible server of vLLM.  Methods raise ServerError."""

    def __init__(self, name: str, url: str, timeout: float) -> None:
        self.name, self._url, self._timeout = name, url.rstrip("/"), timeout

    def complete(self, asked: Asked) -> Answer:
        body = {
            "model": asked.model,
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens,
            "temperature": 0,
            "logprobs": asked.logprobs,
            "return_tokens_as_token_ids": True,
            "cache_salt": asked.salt,
        }
        text = self._request("/v1/completions", json.dumps(body).encode())
        try:
            return _answer(json.loads(text)["choices"][0]["logprobs"])
        except _ODD_ANSWER as exc:
            raise ServerError(f"{self.name}: an answer without log-probabilities") from exc

    def imported_tokens(self) -> float:
        found = _COUNTED.findall(self._request("/metrics"))
        if not found:
            raise ServerError(f"{self.name}: its metrics have no {IMPORTED}: kvshm is not enabled")
        try:
            count = sum(map(float, found))
        except ValueError:
            count = math.nan
        if not math.isfinite(count):
            raise ServerError(f"{self.name}: its metrics state {found[0]} as {IMPORTED}")
        return count

    def imported_since(self, before: float) -> float:
        if (now := self.imported_tokens()) < before:
            raise ServerError(f"{self.name}: it was restarted meanwhile: {IMPORTED} has fallen")
        return now - before

    def _request(self, path: str, body: bytes | None = None) -> str:
        url = self._url + path
        try:
            status, content = exchange(url, body, self._timeout)
            text = content.decode()
        except (OSError, HTTPException, ValueError) as exc:
            raise ServerError(f"{self.name}: {url}: {str(exc) or type(exc).__name__}") from exc
        if not 200 <= status < 300:
            raise ServerError(f"{self.name}: {url}: HTTP {status} {text[:500]}".rstrip())
        return text


def _answer(logprobs: dict[str, Any]) -> Answer:
    tokens = [str(token) for token in logprobs["tokens"]]
    top = [
        {str(token): float(each) for token, each in dict(place or {}).items()}
        for place in logprobs["top_logprobs"] or [{}] * len(tokens)
    ]
    answer = Answer(tokens, [float(each) for each in logprobs["token_logprobs"]], top)
    if not tokens or not len(tokens) == len(answer.logprobs) == len(top):
        raise ValueError("lists of different lengths")
    return answer


@dataclass(frozen=True)
class Outcome:
    answers: dict[str, Answer]
    imported_tokens: float

    def divergences(self) -> dict[tuple[str, str], Divergence]:
        return {
            (one, other): divergence(self.answers[one], self.answers[other])
            for one, other in pairwise(NAMES)
        }


def ask(
    a: Server, b: Server, asked: Asked, wait: float, pause: Callable[[float], None] = time.sleep
) -> Outcome:
    """Ask both servers twice.  ``wait``: seconds in which news of A's blocks reach B."""
    before = b.imported_tokens()
    answers = [a.complete(asked), a.complete(asked)]
    pause(wait)
    answers.append(b.complete(asked))
    imported, waited = b.imported_since(before), 0.0
    while not imported and waited < METRICS_SECONDS:
        pause(_POLL_SECONDS)
        imported, waited = b.imported_since(before), waited + _POLL_SECONDS
    answers.append(b.complete(asked))
    b.imported_since(before + imported)  # else its own hit may be none
    return Outcome(dict(zip(NAMES, answers, strict=True)), imported)


# -- showing


def _verdict(outcome: Outcome, tolerance: float) -> tuple[int, str]:
    if not outcome.imported_tokens:
        return EXIT_NOT_IMPORTED, (
            "nothing was imported: do both engines share (kvshm dump), and has the prompt "
            "more than one block, and enough for an import to be faster (KVSHM_MIN_PREFIX_TOKENS)?"
        )
    found = outcome.divergences()
    if all(found[pair].within(tolerance) for pair in JUDGED):
        return EXIT_AGREE, "the import gives the answer of a local hit"
    return EXIT_DIFFER, "the import gives another answer than a local hit"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _as_data(outcome: Outcome, verdict: str) -> dict[str, Any]:
    """Null stands for an infinite difference."""
    return {
        "verdict": verdict,
        "imported_tokens": outcome.imported_tokens,
        "pairs": [
            {
                "first": one,
                "second": other,
                "judged": (one, other) in JUDGED,
                "first_differing_token": each.first_token,
                "max_logprob_difference": _finite(each.max_logprob),
                "unmatched_candidates": each.unmatched,
            }
            for (one, other), each in outcome.divergences().items()
        ],
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"B imported {found['imported_tokens']:.0f} tokens"
    for pair in found["pairs"]:
        first = pair["first_differing_token"]
        tokens = "equal tokens" if first is None else f"token {first} differs"
        most = pair["max_logprob_difference"]
        judged = "" if pair["judged"] else " (rounding of the engine itself; not judged)"
        yield (
            f"{pair['first']} / {pair['second']}: {tokens}, log-probabilities differ by "
            f"{math.inf if most is None else most:.3g} at most, {pair['unmatched_candidates']} "
            f"candidates unmatched{judged}"
        )
    yield found["verdict"]


def _from(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    return number(kind, lambda x: least <= x <= MOST, f"from {least:g} to {MOST:.0f}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ask two running servers of one model the same prompt and compare what was computed, "
        "imported and hit locally."
    )
    parser.epilog = (
        "exit status: 0 the import gives the answer of a local hit; 1 another answer; 2 wrong "
        "command line, or a server cannot be asked; 3 nothing was imported"
    )
    add = parser.add_argument
    add("--a", metavar="URL", required=True, help="the server that computes the prompt")
    add("--b", metavar="URL", required=True, help="the server that imports it")
    add("--model", required=True, help="name of the model, as both serve it")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text of more than one block")
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="a file with the text")
    count, some, size, period = _from(int, 1), _from(int, 0), _from(float, 0), _from(float, 0.001)
    add("--max-tokens", metavar="N", type=count, default=16, help="tokens of each answer (16)")
    add("--logprobs", metavar="N", type=some, default=5, help="candidates for each token (5)")
    add("--tolerance", metavar="X", type=size, default=0.0, help="difference that is none (0)")
    add("--wait", metavar="SECONDS", type=size, default=1.0, help="before B is asked (1)")
    add("--timeout", metavar="SECONDS", type=period, default=300.0, help="for each answer (300)")
    add("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> int:
    try:
        prompt = options.prompt
        if prompt is None:
            prompt = options.prompt_file.read_text()
        salt = secrets.token_hex(16)
        asked = Asked(options.model, prompt, options.max_tokens, options.logprobs, salt)
        a = Server("A", options.a, options.timeout)
        b = Server("B", options.b, options.timeout)
        outcome = ask(a, b, asked, options.wait)
    except (ServerError, OSError, UnicodeDecodeError) as exc:
        note(f"kvshm verify-logits: {exc}")
        return EXIT_FAILED
    status, verdict = _verdict(outcome, options.tolerance)
    found = _as_data(outcome, verdict)
    show(found, lambda: _lines(found), as_json=options.json)
    return status
