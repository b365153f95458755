"""What is withdrawn on a node comes out of the store beyond it no more, on any node."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvshm.tools.keeper.store import generation_key

from .joined import Toy
from .keepers import prompt
from .processes import PATIENCE_SECONDS, wait_until
from .store_world import Engine, World
from .store_world import world as world

pytestmark = pytest.mark.multiprocess


def test_what_is_withdrawn_on_one_node_is_used_on_none(world: World) -> None:
    """Also what is being fetched when it is withdrawn."""
    world.keeper(world.one)
    second = world.keeper(world.two)
    a = world.engine(world.one, "a").toy
    keys, more = prompt(a, b"1"), prompt(a, b"2")
    a.compute(keys, range(6))
    a.compute(more, range(6, 12))
    world.wait_for_written([*keys, *more])
    b = world.engine(world.two, "b")
    b.wait_until_served()
    assert b.length(keys) == 6
    second.wait_for(keys)
    (world / "held").touch()
    number = b.ask(more)
    assert b.answer(number).length == 6
    wait_until(lambda: len(world.calls("get")) == 2, "it is being fetched")
    a.node.reset()
    wait_until(lambda: bool(world.calls("set_number")), "the withdrawal is in the store")
    (world / "held").unlink()
    wait_until(lambda: b.answer(number).length == 0, "the engine is told that it does not come")
    wait_until(lambda: not any(second.has(keys)), "what was fetched before is gone")
    assert not any(second.has(more))
    assert b.length(keys) == b.length(more) == 0


def test_what_was_computed_after_a_withdrawal_is_shared_again(world: World) -> None:
    first, second = world.keeper(world.one), world.keeper(world.two)
    a, b = world.engine(world.one, "a").toy, world.engine(world.two, "b")
    keys = prompt(a, b"1")
    a.compute(keys, range(6))
    world.wait_for_written(keys)
    b.wait_until_served()
    a.node.reset()
    assert a.node.wait_joined(PATIENCE_SECONDS)
    wait_until(lambda: bool(world.calls("set_number")), "the withdrawal is in the store")
    wait_until(lambda: b.length(keys) == 0, "the other node's keeper knows of it")
    a.compute(keys, range(6))
    first.wait_for(keys)
    wait_until(lambda: b.length(keys) == 6, "the other node will have what was computed since")
    second.wait_for(keys)
    number = world.store.number(generation_key(a.table.fingerprint.hex()))
    assert all(f"/{number}/" in key for key in world.calls("get")[-1][1:])


def test_what_is_fetched_after_a_withdrawal_here_stays(world: World) -> None:
    world.keeper(world.one)
    second = world.keeper(world.two)
    a, b = world.engine(world.one, "a").toy, world.engine(world.two, "b")
    b.wait_until_served()
    b.toy.node.reset()
    assert b.toy.node.wait_joined(PATIENCE_SECONDS)
    wait_until(lambda: bool(world.calls("set_number")), "the withdrawal is in the store")
    keys = prompt(a, b"1")
    wait_until(lambda: computed_anew(a, b, keys), "prompts cross again")
    second.wait_for(keys)
    for _ in range(3):  # the keeper goes round more than once for each
        b.length(prompt(b.toy, b"nobody's"))
    assert second.has(keys) == [True] * 6


def computed_anew(a: Toy, b: Engine, keys: Sequence[bytes]) -> bool:
    """The first node's keeper learns of the other number within a second."""
    a.node.retract(range(6))
    a.compute(keys, range(6))
    return b.length(keys) == 6


def test_a_withdrawal_of_which_no_keeper_was_there_to_hear_is_told_by_the_engine(
    world: World,
) -> None:
    first = world.keeper(world.one)
    a, keys = world.served_and_written()
    assert first.process.terminate() == 0
    # As SchedulerHalf.end_epoch says it.
    a.asks.withdrew = a.toy.table.fingerprint, a.toy.node.epoch
    a.toy.node.reset()
    world.keeper(world.one)
    assert a.toy.node.wait_joined(PATIENCE_SECONDS)
    a.asks.give_up()

    def is_confirmed() -> bool:
        assert a.length(keys) == 0
        return a.asks._confirmed == a.asks.withdrew[1]

    wait_until(is_confirmed, "the keeper has raised the number")
    a.wait_until_served()
    assert a.length(keys) == 0
    assert len(world.calls("set_number")) == 1


def test_a_store_that_has_lost_its_number_gives_out_nothing_that_was_withdrawn(
    world: World,
) -> None:
    """Of keepers that are there one writes it again; without any it is another one."""
    first = world.keeper(world.one)
    a, keys = world.served_and_written()
    a.toy.node.reset()
    assert a.toy.node.wait_joined(PATIENCE_SECONDS)
    a.wait_until_served()
    assert first.process.terminate() == 0
    world.store.path(generation_key(a.toy.table.fingerprint.hex())).unlink()
    world.keeper(world.one)
    a.asks.give_up()
    a.wait_until_served()
    assert a.length(keys) == 0


def test_what_is_withdrawn_before_the_keeper_has_reached_the_store_is_not_used(
    world: World,
) -> None:
    """Another keeper had written it, and the store's number is not the first one."""
    first = world.keeper(world.one)
    a = world.engine(world.one, "a").toy
    world.keeper(world.two)
    b = world.engine(world.two, "b")
    a.compute(prompt(a, b"before"), range(6))
    first.wait_for(prompt(a, b"before"))
    a.node.reset()
    assert a.node.wait_joined(PATIENCE_SECONDS)
    wait_until(lambda: bool(world.calls("set_number")), "the first withdrawal is in the store")
    keys = prompt(a, b"1")
    a.compute(keys, range(6))
    world.wait_for_written(keys)
    assert first.process.terminate() == 0
    b.wait_until_served()
    (world / "down").touch()
    again = world.keeper(world.one)
    again.wait_for(keys)
    a.node.reset()
    wait_until(lambda: not any(again.has(keys)), "the keeper hears of the withdrawal")
    (world / "down").unlink()
    wait_until(lambda: len(world.calls("set_number")) == 2, "the second one is in the store")
    wait_until(lambda: b.length(keys) == 0, "the other node uses it no more")
