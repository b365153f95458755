"""What a load test sends: as popular, as often and as long as it says, and to each arm the same."""

from __future__ import annotations

from collections import Counter

import pytest
from load_traffic import ROUTERS, Clients, Request, Traffic, zipf_weights

LONG = Traffic(rate=50, seconds=200, prefixes=8, prefix_tokens=64, tail_tokens=4)


def sent(traffic: Traffic, contents: int = 1, seed: int = 2) -> list[Request]:
    return list(Clients(traffic, contents).requests(seed))


def changed(**values: float) -> Traffic:
    return Traffic(**{**vars(LONG), **values})


def test_prefixes_are_as_popular_as_zipfs_law_says() -> None:
    requests = sent(LONG)
    assert len(requests) == pytest.approx(50 * 200, rel=0.05)
    weights = zipf_weights(8, 1.0)
    for prefix, count in Counter(request.key for request in requests).items():
        assert count / len(requests) == pytest.approx(weights[prefix] / sum(weights), rel=0.15)


def test_a_prefix_is_the_same_each_time_and_a_tail_never() -> None:
    requests = sent(LONG)[:200]
    begins = {(r.key, tuple(r.prompt[:64])) for r in requests}
    assert len(begins) == len({r.key for r in requests}) == len({b for _, b in begins})
    assert len({tuple(r.prompt) for r in requests}) == 200
    assert {len(r.prompt) for r in requests} == {68} == {LONG.longest_prompt}


def test_popularity_moves_on() -> None:
    requests = sent(changed(shift=100, zipf=3.0))
    halves = [[r.key for r in requests if (r.at < 100) is first] for first in (True, False)]
    assert [Counter(half).most_common(1)[0][0] for half in halves] == [0, 2]


def test_agents_go_on_from_what_was_said_and_fork() -> None:
    requests = sent(changed(agents=5))[:400]
    said, continued, forked = {}, 0, 0
    for request in requests:
        before = tuple(request.prompt[:-4])
        if len(before) > 64:
            continued += 1
            forked += said[before]  # that turn was sent
            said[before] += 1
        said[tuple(request.prompt)] = 0
    assert continued > 200
    assert forked > 20
    assert max(len(r.prompt) for r in requests) == changed(agents=5).longest_prompt == 64 + 6 * 4


def test_users_come_back_with_what_was_said_and_others_take_over() -> None:
    traffic = changed(users=3, answer_tokens=2)
    answer, thought, turns = [1, 2], [], Counter()
    for place, conversation in enumerate(Clients(traffic, 1).conversations(2)):
        request = next(conversation)
        for _ in range(400):
            thought.append(request.at)
            turns[request.key] += 1
            assert request.key % 3 == place
            assert len(request.prompt) == 64 + 4 + (turns[request.key] - 1) * (2 + 4)
            before, request = request, conversation.send(answer)
            if request.key == before.key:
                assert request.prompt[:-4] == before.prompt + answer
            else:
                assert request.key == before.key + 3
                assert len(request.prompt) == 64 + 4
    assert sum(thought) / len(thought) == pytest.approx(3 / 50, rel=0.1)
    assert {turns[key] for key in turns if 3 <= key < max(turns) - 30} == {6}
    assert traffic.longest_prompt == 64 + 6 * 4 + 5 * 2


def test_users_ask_the_same_in_every_arm() -> None:
    def first(contents: int, seed: int) -> list[Request]:
        return [next(c) for c in Clients(changed(users=4), contents).conversations(seed)]

    assert first(1, 2) == first(1, 2)
    assert [r[:2] for r in first(1, 2)] == [r[:2] for r in first(9, 2)]
    assert not {tuple(r.prompt[-4:]) for r in first(1, 2)} & {
        tuple(r.prompt[-4:]) for r in first(1, 3)
    }


def test_arms_get_the_same_but_for_the_tokens() -> None:
    assert sent(LONG) == sent(LONG)
    others = sent(LONG, contents=9)
    assert [r[:2] for r in sent(LONG)] == [r[:2] for r in others]
    assert not {tuple(r.prompt[:64]) for r in sent(LONG)} & {tuple(r.prompt[:64]) for r in others}


def test_routers_choose_as_they_are_called() -> None:
    routes = {name: make() for name, make in ROUTERS.items()}
    assert [routes["rr"](5, [9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]
    assert {routes["affinity"](7, [n, 0, 0]) for n in range(3)} == {1}
    assert routes["least"](0, [2, 1, 3]) == 1
    assert {routes["least"](0, [1, 1, 3]) for _ in range(20)} == {0, 1}
