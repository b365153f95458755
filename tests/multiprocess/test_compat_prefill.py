"""kvshm.compat.prefill between two processes: the hooks of a prefill, byte by byte, and a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import kvshm
from kvshm.compat.prefill import after_prefill, before_prefill, join_cache
from kvshm.errors import MisuseError

from .compat_nodes import Calls, calls_on
from .processes import PATIENCE_SECONDS, Node, wait_until

TOKENS = list(range(100, 119))


def answer(blocks: Any, _: int) -> Any:
    return blocks


@pytest.fixture
def calls(node: Node) -> Iterator[Calls]:
    with calls_on(node) as calls:
        yield calls


def test_what_one_has_prefilled_the_other_loads(calls: Calls) -> None:
    other = calls.other()
    other.do("store", TOKENS, [5, 3, 8, 0, 1])
    calls.wait_found(TOKENS, 16)
    asked: list[int] = []

    def alloc_prefix(length: int) -> list[int]:
        asked.append(length)
        return [9, 2, 0, 4][: length // 4]

    node = calls.own.node
    assert before_prefill(node, TOKENS, alloc_prefix, min_prefix=17) is None
    assert before_prefill(node, [7, *TOKENS], alloc_prefix) is None
    assert before_prefill(node, TOKENS, alloc_prefix, salt=b"other") is None
    assert asked == []
    assert before_prefill(node, TOKENS, alloc_prefix, min_prefix=16) == (16, [9, 2, 0, 4])
    assert asked == [16]
    for number, block in enumerate([9, 2, 0, 4]):
        calls.own.expect(TOKENS, number, block)
    assert after_prefill(node, TOKENS, [9, 2, 0, 4, 6], 15) == 12
    assert node.contains(node.keys(TOKENS)) == ["own", "own", "own", "peer"]


def test_a_wrong_allocation_is_refused_and_nothing_is_leased(calls: Calls) -> None:
    other = calls.other()
    other.do("store", TOKENS[:8], [5, 3])
    calls.wait_found(TOKENS[:8])
    for wrong in ([0], None, [0.0, 1.0], "01"):
        with pytest.raises(MisuseError):
            before_prefill(calls.own.node, TOKENS, partial(answer, wrong))
    other.do("retract", [5, 3])
    wait_until(lambda: calls.own.calls.lookup(TOKENS) == 0, "the retract")


def test_engines_share_if_mesh_and_prefix_signature_are_equal(calls: Calls) -> None:
    own = calls.own
    same, other_signature = own.identity, replace(own.identity, weights="other")
    elsewhere = calls.node.with_other_namespace()
    elsewhere.coordinator()
    joined: list[kvshm.Node] = []
    try:
        for mesh, signature in [
            (calls.node.namespace, same),
            (calls.node.namespace, other_signature),
            (elsewhere.namespace, same),
        ]:
            memory = kvshm.allocate(own.memory.nbytes)
            node = join_cache(
                mesh,
                signature,
                memory=memory,
                regions=own.regions,
                block_size=4,
                config=calls.config("not-this-one"),
                name=f"joined {len(joined)}",
            )
            joined.append(node)
            assert node.wait_joined(PATIENCE_SECONDS)
        own.store(TOKENS[:8], [0, 1])
        keys = own.node.keys(TOKENS[:8])
        assert joined[0].wait_for(keys, PATIENCE_SECONDS).length == 2
        assert [node.lookup(keys).length for node in joined] == [2, 0, 0]
    finally:
        for node in joined:
            node.close()
