"""The simulation of eviction: what its orders must find, and that duplicates first is nearly one
cache."""

from __future__ import annotations

from itertools import islice

import pytest
from simulate_eviction import ORDERS, Found, Node, popular, simulate


def shares(zipf: float, blocks: int, tail: int = 1, engines: int = 2) -> dict[str, Found]:
    prompts = list(islice(popular(24, zipf, tail), 1500))
    return {order: simulate(order, prompts, engines, blocks) for order in ORDERS}


@pytest.mark.parametrize("zipf", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("engines", [2, 4])
def test_duplicates_first_is_nearly_one_cache(zipf: float, engines: int) -> None:
    found = shares(zipf, 520 // engines, engines=engines)
    assert found["plain"].all < found["vllm"].all < found["duplicates"].all
    assert found["duplicates"].all > 0.93 * found["ideal"].all
    if engines == 2:
        assert found["duplicates"].all > 0.97 * found["ideal"].all


@pytest.mark.parametrize(
    ("share", "duplicates_first", "a", "b"),
    [
        (False, False, (0, 0), (2, 0)),
        (True, False, (0, 0), (2, 0)),
        (True, True, (0, 2), (0, 2)),
    ],
    ids=ORDERS[:3],
)
def test_an_order_decides_which_of_two_prefixes_is_dropped(
    share: bool, duplicates_first: bool, a: tuple[int, int], b: tuple[int, int]
) -> None:
    """One engine has both, a longer than b, and the other one has b, too."""
    node = Node(2, 8, share=share, duplicates_first=duplicates_first)
    for engine, first in ((0, 10), (0, 20), (1, 20), (0, 30), (0, 40), (0, 50)):
        node.ask(engine, [first, first + 1])
    assert node.ask(1, [10, 11]) == a
    assert node.ask(0, [20, 21]) == b
