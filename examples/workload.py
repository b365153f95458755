"""Requests that share prefixes the way real ones do: a system prompt, documents, turns.

The text is drawn from a seeded generator, so that every run sends the same requests and a
machine needs nothing but this file.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from string import ascii_lowercase

Message = dict[str, str]
Chat = tuple[Message, ...]


@dataclass(frozen=True)
class Request:
    """One chat whose first part engine A has seen when engine B is asked."""

    kind: str
    before: Chat
    """Sent to engine A first: computes and publishes what the two chats share."""
    asked: Chat
    """Sent to engine B, which imports the shared prefix."""


class Author:
    """Writes text without meaning: words of letters, always the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def words(self, count: int) -> str:
        """Return ``count`` words of two to eight letters; about two tokens a word."""
        drawn = self._random
        lengths = (drawn.randint(2, 8) for _ in range(count))
        return " ".join("".join(drawn.choices(ascii_lowercase, k=n)) for n in lengths)

    def message(self, role: str, words: int) -> Message:
        """Return one message of a chat."""
        return {"role": role, "content": self.words(words)}


def system_prompt(author: Author) -> Request:
    """Two users ask different things below the same long system prompt."""
    system = author.message("system", 400)
    before, asked = ((system, author.message("user", 40)) for _ in range(2))
    return Request("system prompt", before, asked)


def retrieval(author: Author) -> Request:
    """Two questions about the same retrieved documents, below the same instructions."""
    system = author.message("system", 60)
    documents = [author.words(200) for _ in range(4)]
    scaffold = "\n\n".join(f"[{i}] {text}" for i, text in enumerate(documents, 1))

    def ask() -> Chat:
        return (system, {"role": "user", "content": f"{scaffold}\n\n{author.words(20)}"})

    return Request("RAG scaffold", ask(), ask())


def conversation(author: Author) -> list[Request]:
    """A chat that moves to the other engine with every second turn."""
    turns = [author.message("system", 80), author.message("user", 150)]
    requests = []
    for _ in range(2):
        before = tuple(turns)
        turns += [author.message("assistant", 120), author.message("user", 60)]
        requests.append(Request("multi-turn", before, tuple(turns)))
        turns += [author.message("assistant", 120), author.message("user", 60)]
    return requests


def shared_prefixes(seed: int = 0) -> list[Request]:
    """Return the demo's requests, in the order in which they are sent."""
    author = Author(seed)
    prompts = [kind(author) for kind in (system_prompt, retrieval) for _ in range(2)]
    return prompts + conversation(author)
