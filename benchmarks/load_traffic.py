"""What clients send in a load test, and to which engine: drawn from a seed, so that every arm gets
the same.  Pure.

Popular prefixes     each request is one of ``prefixes`` long prefixes, drawn by Zipf's law, with a
                     tail of its own.  With ``shift`` the popularity moves on every so many seconds:
                     a quarter of the prefixes changes places with the next quarter.
Agents               each request is the next turn of an agent, that is all that was said so far and
                     a tail; an agent begins with one of the prefixes, and now and then two go on
                     from the same turn.
Users                each of ``users`` comes back with all that was said, the answers too, and a
                     question, after a while of thinking: the next request waits for the answer.
                     A user begins with one of the prefixes, and another one takes over after some
                     turns.  Router and engine know the user, not the prefix.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

VOCABULARY = range(300, 900)
FORKS = 0.2
"""Share of an agent's turns from which another agent begins."""
TURNS = 6
"""Turns of an agent or a user before another one takes its place."""


@dataclass(frozen=True)
class Traffic:
    """The properties of what is sent."""

    rate: float
    """Requests a second, in Poisson arrivals; of users: if every answer came at once."""
    seconds: float
    prefixes: int = 24
    prefix_tokens: int = 2048
    tail_tokens: int = 60
    zipf: float = 1.0
    shift: float = 0.0
    agents: int = 0
    """How many go on side by side; 0: none, each request is a prefix and a tail."""
    users: int = 0
    """How many talk side by side, instead of prefixes or agents."""
    answer_tokens: int = 8

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        answers = self.answer_tokens * (TURNS - 1) if self.users else 0
        turns = TURNS if self.agents or self.users else 1
        return self.prefix_tokens + self.tail_tokens * turns + answers


class Request(NamedTuple):
    at: float
    """Seconds after the start; of a user: after the answer before."""
    key: int
    """The number of its prefix, or of its user: by it affinity chooses an engine."""
    prompt: list[int]


Conversation = Generator[Request, list[int], None]
"""A place among the users, for ever: yields what is asked, and is sent the answer."""


class _Agent:
    """One agent: what was said so far."""

    def __init__(self, prefix: int, said: list[int], turns: int = 0) -> None:
        self.prefix, self.said, self.turns = prefix, said, turns


class Clients:
    """All clients of one run.  ``contents``: seed of the tokens; another one shares nothing."""

    def __init__(self, traffic: Traffic, contents: int) -> None:
        self._traffic = traffic
        drawn = random.Random(contents)
        self._prefixes = [_tokens(drawn, traffic.prefix_tokens) for _ in range(traffic.prefixes)]
        self._agents: list[_Agent] = []

    def requests(self, seed: int, traffic: Traffic | None = None) -> Iterator[Request]:
        """Yield a run of requests, in the order of their arrival.  ``traffic``: another rate and
        time."""
        run, drawn, at = traffic or self._traffic, random.Random(seed), 0.0
        draw = self._next_turn if run.agents else self._popular
        while (at := at + drawn.expovariate(run.rate)) < run.seconds:
            yield Request(at, *draw(drawn, at))

    def conversations(self, seed: int, traffic: Traffic | None = None) -> list[Conversation]:
        """Return what each of the users does.  ``traffic``: another rate."""
        run = traffic or self._traffic
        return [self._converse(place, random.Random(f"{seed} {place}"), run)
                for place in range(run.users)]  # fmt: skip

    def _converse(self, user: int, drawn: random.Random, run: Traffic) -> Conversation:
        turns = drawn.randint(1, TURNS)  # a run begins in the middle of what users say
        while True:
            said = self._prefixes[self._draw_prefix(drawn, 0.0)]
            for _ in range(turns):
                said = said + _tokens(drawn, run.tail_tokens)
                thinks = drawn.expovariate(run.rate / run.users)
                said = said + (yield Request(thinks, user, said))
            user, turns = user + run.users, TURNS

    def _popular(self, drawn: random.Random, at: float) -> tuple[int, list[int]]:
        prefix = self._draw_prefix(drawn, at)
        return prefix, self._prefixes[prefix] + _tokens(drawn, self._traffic.tail_tokens)

    def _draw_prefix(self, drawn: random.Random, at: float) -> int:
        traffic = self._traffic
        weights = zipf_weights(traffic.prefixes, traffic.zipf)
        rank = drawn.choices(range(traffic.prefixes), weights)[0]
        moved = int(at / traffic.shift) * -(-traffic.prefixes // 4) if traffic.shift else 0
        return (rank + moved) % traffic.prefixes

    def _next_turn(self, drawn: random.Random, at: float) -> tuple[int, list[int]]:
        while len(self._agents) < self._traffic.agents:
            prefix = self._draw_prefix(drawn, at)
            self._agents.append(_Agent(prefix, self._prefixes[prefix]))
        place = drawn.randrange(len(self._agents))
        agent = self._agents[place]
        agent.said = agent.said + _tokens(drawn, self._traffic.tail_tokens)
        agent.turns += 1
        if agent.turns == TURNS:
            del self._agents[place]
        elif drawn.random() < FORKS:
            other = drawn.randrange(len(self._agents))
            self._agents[other] = _Agent(agent.prefix, agent.said, agent.turns)
        return agent.prefix, agent.said


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Return the relative popularity of each of ``count``, the most popular one first."""
    return [1 / (rank + 1) ** exponent for rank in range(count)]


def _tokens(drawn: random.Random, count: int) -> list[int]:
    return drawn.choices(VOCABULARY, k=count)


# -- routers: (prefix or user, requests under way on each engine) -> the engine's number

Router = Callable[[int, Sequence[int]], int]


def round_robin() -> Router:
    turn = -1

    def route(key: int, busy: Sequence[int]) -> int:
        nonlocal turn
        turn += 1
        return turn % len(busy)

    return route


def affinity() -> Router:
    """A prefix or user always goes to the same engine, as many of them to each."""
    return lambda key, busy: key % len(busy)


def least_load() -> Router:
    """Where the fewest requests are under way; by lot where there are several."""
    lots = random.Random(1)
    return lambda key, busy: min(range(len(busy)), key=lambda i: (busy[i], lots.random()))


ROUTERS: dict[str, Callable[[], Router]] = {
    "rr": round_robin,
    "affinity": affinity,
    "least": least_load,
}
