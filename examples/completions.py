"""One streamed request to an OpenAI-compatible server, down to token ids and log-probabilities."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Logprobs = tuple[tuple[str, float], ...]
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Result:
    """What a model answered; equal if tokens and log-probabilities agree in every bit."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    """For each token, the most likely ones with their log-probabilities, sorted by token."""
    text: str
    prompt_tokens: int = field(compare=False)
    ttft_s: float = field(compare=False)
    """Seconds from sending the request to the first token."""
    last_at: float = field(compare=False)
    """Reading of ``time.perf_counter`` at the last token."""
    arrivals: tuple[float, ...] = field(compare=False, default=())
    """Readings of ``time.perf_counter`` at each message that brought tokens."""

    def agreement(self, other: Result) -> float:
        """Return the share of tokens that agree before the two first part."""
        same = 0
        for mine, theirs in zip(self.tokens, other.tokens, strict=True):
            if mine != theirs:
                break
            same += 1
        return same / len(self.tokens)


def stream(
    port: int, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Result:
    """Send one greedy request to the server at ``port`` and return its answer.

    ``headers`` are sent beside the usual ones.  Blocks until the last token.  RuntimeError if the
    server answers with an error or stops in the middle, OSError if it cannot be reached.
    """
    greedy = {"temperature": 0, "seed": 1, "ignore_eos": True, "stream": True}
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    usage = {"stream_options": {"include_usage": True}}
    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    arrivals: list[float] = []
    text, prompt_tokens = "", 0
    begin = time.perf_counter()
    for chunk in _events(port, path, {**greedy, **ids, **usage, **body}, headers or {}):
        if "error" in chunk:
            raise RuntimeError(f"{path}: {chunk['error']}")
        if chunk.get("usage"):
            prompt_tokens = chunk["usage"]["prompt_tokens"]
        for choice in chunk["choices"]:
            if choice.get("token_ids"):
                arrivals.append(time.perf_counter())
                tokens += choice["token_ids"]
                logprobs += _logprobs(choice["logprobs"])
                text += choice["text"] if "text" in choice else choice["delta"]["content"] or ""
    if len(tokens) != body["max_tokens"]:
        raise RuntimeError(f"{path}: {len(tokens)} of {body['max_tokens']} tokens arrived")
    return Result(
        tuple(tokens), tuple(logprobs), text, prompt_tokens, arrivals[0] - begin, arrivals[-1],
        tuple(arrivals),
    )  # fmt: skip


def _events(
    port: int, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of one request as they arrive."""
    sent = {"Content-Type": "application/json", **headers}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), sent)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{path}: status {answer.status}: {answer.read()[:2000]!r}")
        while line := answer.readline():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        connection.close()


def _logprobs(found: Mapping[str, Any]) -> list[Logprobs]:
    """Return the log-probabilities of a completion's or a chat's chunk in one form."""
    if "content" in found:
        tops = [entry["top_logprobs"] for entry in found["content"]]
        return [tuple(sorted((t["token"], t["logprob"]) for t in top)) for top in tops]
    return [tuple(sorted(top.items())) for top in found["top_logprobs"]]
