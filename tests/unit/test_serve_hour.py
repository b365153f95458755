"""The last hour, in points of half a minute."""

from __future__ import annotations

from kvshm.tools.node.reading import NodeReading
from kvshm.tools.serve.hour import MOST_POINTS, POINT_SECONDS, Hour

from .looks import copied, engine, node


def look(at: float, local: int = 0, copied_bytes: int = 0, own_bytes: int = 0) -> NodeReading:
    counters = {
        "prompt_tokens_local": local,
        "prompt_tokens_peer": 2 * local,
        "prompt_tokens_computed": 3 * local,
        "discarded": 4 * local,
    }
    traffic = [copied(2, copied_bytes), copied(1, own_bytes)]
    return node(engine(1, counters=counters, traffic=traffic), engine(2), at=at)


def test_a_point_has_what_was_counted_in_half_a_minute() -> None:
    hour = Hour()
    for at in range(31):
        hour.add(look(float(at), 10 * at, 100 * at, 7 * at))
    made, (point,) = hour.since(0)
    assert made == 1
    assert (point.seconds, point.local, point.peer, point.computed) == (30.0, 300, 600, 900)
    assert (point.copied_bytes, point.discarded) == (3000, 1200)
    assert point.time == look(30.0).real_ns / 1e9


def test_looks_far_apart_make_one_point_of_as_many_seconds() -> None:
    hour = Hour()
    hour.add(look(0.0))
    hour.add(look(600.0, 5))
    (point,) = hour.since(0)[1]
    assert (point.seconds, point.local) == (600.0, 5)


def test_engines_that_ended_take_nothing_away_and_new_ones_count() -> None:
    hour = Hour()
    hour.add(node(engine(1, counters={"discarded": 900})))
    hour.add(node(engine(2, counters={"discarded": 4}, created_ns=node().real_ns + 1), at=40.0))
    (point,) = hour.since(0)[1]
    assert point.discarded == 4


def test_pages_get_what_they_have_not_seen_and_no_more_than_an_hour() -> None:
    hour, half = Hour(), POINT_SECONDS
    for turn in range(MOST_POINTS + 11):
        hour.add(look(turn * half, turn))
    made, points = hour.since(0)
    assert (made, len(points)) == (MOST_POINTS + 10, MOST_POINTS)
    assert hour.since(made) == (made, [])
    assert hour.since(made - 2)[1] == points[-2:]
    assert sum(point.seconds for point in points) == MOST_POINTS * half
