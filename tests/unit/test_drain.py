"""When a drain ends, what a keeper copies for it, and which process's engines are meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvshm import BlockName, Change, News
from kvshm._base.ids import BlockId
from kvshm.tools.drain.progress import (
    STALL_SECONDS,
    End,
    Holder,
    Limits,
    Progress,
    bar,
    decide,
    find,
    size,
)
from kvshm.tools.keeper.catalogue import Catalogue
from kvshm.tools.keeper.outgoing import LIST_SECONDS, Keepers, Outgoing
from kvshm.tools.node.whereabouts import ancestors

A, B, KEEPER = 1, 2, 9
GOING = Progress(left=3, kept_bytes=50, keepers=1, seconds=2.0, rested=1.0, gone=False)
LIMITS = Limits(seconds=30.0, nbytes=100)


# -- the command


@pytest.mark.parametrize(
    ("change", "end"),
    [
        ({}, None),
        ({"left": 0}, End.KEPT),
        ({"left": 0, "keepers": 0, "seconds": 99.0}, End.KEPT),
        ({"keepers": 0}, End.NO_KEEPER),
        ({"kept_bytes": 100}, End.BYTES),
        ({"seconds": 30.0}, End.SECONDS),
        ({"rested": STALL_SECONDS}, End.STALLED),
        ({"gone": True, "left": 0}, End.GONE),
    ],
)
def test_when_a_drain_ends(change: dict[str, int], end: End | None) -> None:
    assert decide(GOING._replace(**change), LIMITS) is end


def test_without_a_limit_of_bytes_none_counts() -> None:
    assert decide(GOING._replace(kept_bytes=1 << 50), LIMITS._replace(nbytes=None)) is None


def test_what_is_alone_is_with_no_engine_that_goes_on() -> None:
    own = {(b"%d" % number, 0) for number in range(6)}
    others = [
        Holder({(b"1", 0), (b"7", 0)}, keeps=False, in_drain=False),
        Holder({(b"2", 0)}, keeps=True, in_drain=False),
        Holder({(b"3", 0)}, keeps=False, in_drain=True),
        Holder({(b"4", 1)}, keeps=False, in_drain=False),
    ]
    found = find(own, others)
    assert found.alone == {(b"0", 0), (b"3", 0), (b"4", 0), (b"5", 0)}
    assert (found.kept, found.keepers) == ({(b"2", 0)}, 1)


@pytest.mark.parametrize(("done", "whole", "cells"), [(0, 4, 0), (1, 4, 6), (4, 4, 24), (0, 0, 24)])
def test_a_bar(done: int, whole: int, cells: int) -> None:
    assert bar(done, whole) == f"[{'#' * cells}{'.' * (24 - cells)}]"


def test_a_size() -> None:
    assert [size(0), size(12_340_000), size(9_870_000_000)] == ["0.0 MB", "12.3 MB", "9.9 GB"]


def test_the_parents_of_a_process() -> None:
    found = list(ancestors(os.getpid()))
    assert found[:2] == [os.getpid(), os.getppid()]
    assert list(ancestors(0)) == []


def test_a_process_whose_name_looks_like_its_end(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) R 1 (b) S 5 7 7 0")
    assert list(ancestors(7, tmp_path)) == [7, 5]


# -- the keeper


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(32, "little"), 0)


def put(block: int, number: int, depth: int = 0, generation: int = 0) -> Change:
    return Change(BlockId(block), generation, name(number), depth)


def known(**engines: tuple[Change, ...]) -> Catalogue:
    catalogue = Catalogue()
    for engine, changes in engines.items():
        list(catalogue.hear(News({"a": A, "b": B, "keeper": KEEPER}[engine], changes), {KEEPER}))
    return catalogue


def taken(
    outgoing: Outgoing, catalogue: Catalogue, *engines: int, most: int = 9, now: float = 0.0
) -> list[int]:
    def is_kept(block: BlockName) -> bool:
        return KEEPER in catalogue.holders(block)

    found = outgoing.take(most, frozenset(engines), catalogue, is_kept, Keepers(), now)
    return [int.from_bytes(each.key, "little") for each in found]


def test_the_most_used_come_first_and_of_these_the_first_of_a_prefix() -> None:
    catalogue = known(
        a=(put(0, 10, 0), put(1, 11, 1), put(2, 20, 0), put(2, 12, 2, 1), put(3, 20, 0, 1)),
        b=(put(0, 30),),
    )
    outgoing = Outgoing()
    assert taken(outgoing, catalogue, A, most=2) == [20, 10]
    assert taken(outgoing, catalogue, A) == [11, 12]
    taken_now = [name(number) for number in (10, 11, 12, 20)]
    assert all(outgoing.is_last(each, Catalogue()) for each in taken_now)


def test_only_what_no_engine_has_that_goes_on_and_no_keeper_comes() -> None:
    catalogue = known(
        a=(put(0, 1), put(1, 2), put(2, 3)), b=(put(0, 2), put(1, 4)), keeper=(put(0, 3),)
    )
    assert taken(Outgoing(), catalogue, A) == [1]
    assert sorted(taken(Outgoing(), catalogue, A, B)) == [1, 2, 4]


def test_what_is_computed_meanwhile_comes_a_moment_later() -> None:
    catalogue, outgoing = known(a=(put(0, 1),)), Outgoing()
    assert taken(outgoing, catalogue, A) == [1]
    list(catalogue.hear(News(A, (put(1, 2),)), {KEEPER}))
    assert taken(outgoing, catalogue, A) == []
    assert sorted(taken(outgoing, catalogue, A, now=LIST_SECONDS)) == [1, 2]


def test_once_no_engine_is_in_drain_all_may_go_again() -> None:
    catalogue, outgoing = known(a=(put(0, 1),)), Outgoing()
    taken(outgoing, catalogue, A)
    assert outgoing.is_last(name(1), catalogue)
    assert taken(outgoing, catalogue) == []
    assert not outgoing.is_last(name(1), catalogue)


def test_what_is_kept_of_an_engine_in_drain_stays() -> None:
    catalogue, outgoing = known(a=(put(0, 1), put(1, 2)), b=(put(0, 2),)), Outgoing()
    taken(outgoing, catalogue, A, most=0)
    assert [outgoing.is_last(name(number), catalogue) for number in (1, 2)] == [True, False]


def test_several_keepers_begin_with_different_blocks() -> None:
    catalogue = known(a=tuple(put(number, number) for number in range(8)))

    def first(turn: int) -> set[BlockName]:
        taking = Outgoing().take(
            4, frozenset({A}), catalogue, lambda _: False, Keepers(turn, 2), 0.0
        )
        return set(taking)

    assert len(first(0) | first(1)) == 8
