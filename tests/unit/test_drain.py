"""When a drain ends, what a keeper copies for it, and which process's engines are meant."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvshm import BlockName, Change, News
from kvshm._base.ids import BlockId, Epoch
from kvshm.errors import KvshmError
from kvshm.tools.drain.bars import Part, bar, line, size
from kvshm.tools.drain.choice import choose
from kvshm.tools.drain.progress import (
    FULL_SHARE,
    SILENT_SECONDS,
    STALL_SECONDS,
    YOUNG_SECONDS,
    End,
    Limits,
    Other,
    Progress,
    decide,
    find,
    pause_after,
    why_none,
)
from kvshm.tools.keeper.catalogue import Catalogue
from kvshm.tools.keeper.outgoing import LIST_SECONDS, Keepers, Leaving, Outgoing
from kvshm.tools.node.reading import EngineReading
from kvshm.tools.node.whereabouts import ancestors

from . import looks

A, B, KEEPER = 1, 2, 9
GOING = Progress(
    left=3,
    kept_bytes=50,
    keepers=1,
    full=True,
    may_come=False,
    seconds=2.0,
    rested=1.0,
    gone=False,
    undone=False,
    silent=False,
)
OTHER = Other(
    "b",
    7,
    alike=True,
    names=frozenset(),
    keeps=False,
    in_drain=False,
    answers=True,
    age=60.0,
    filled=0.5,
)
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
        ({"rested": STALL_SECONDS, "full": False}, None),
        ({"rested": STALL_SECONDS, "full": False, "silent": True}, End.SILENT),
        ({"silent": True}, None),
        ({"gone": True, "left": 0}, End.GONE),
        ({"undone": True, "left": 0}, End.UNDONE),
        ({"keepers": 0, "may_come": True}, None),
        ({"keepers": 0, "may_come": True, "seconds": 30.0}, End.NO_KEEPER),
    ],
)
def test_when_a_drain_ends(change: dict[str, int], end: End | None) -> None:
    assert decide(GOING._replace(**change), LIMITS) is end


def test_without_a_limit_of_bytes_none_counts() -> None:
    assert decide(GOING._replace(kept_bytes=1 << 50), LIMITS._replace(nbytes=None)) is None


@pytest.mark.parametrize(
    ("took", "left", "pause"),
    [
        (0.0, 9.0, 0.1),
        (0.1, 9.0, 0.5),
        (3.0, 9.0, 1.0),
        (3.0, 0.2, 0.2),
        (0.0, 0.0, 0.0),
        (1.0, -2.0, 0.0),
    ],
)
def test_a_large_table_takes_no_more_time_than_is_allowed(
    took: float, left: float, pause: float
) -> None:
    assert pause_after(took, left) == pause


def test_what_is_alone_is_with_no_engine_that_goes_on() -> None:
    own = {b"%d" % number for number in range(6)}
    others = [
        OTHER._replace(names={b"1", b"7"}),
        OTHER._replace(names={b"2"}, keeps=True),
        OTHER._replace(names={b"3"}, in_drain=True),
        OTHER._replace(names={b"4 of group 1"}),
        OTHER._replace(names={b"5"}, answers=False),
        OTHER._replace(name="k", names={b"0"}, keeps=True, answers=False),
    ]
    found = find(own, others)
    assert found.alone == {b"0", b"3", b"4", b"5"}
    assert (found.kept, found.keepers, found.full) == ({b"2"}, 1, False)


def test_a_keeper_is_full_with_blocks_of_all_kinds() -> None:
    keeper = OTHER._replace(keeps=True, filled=0.5)
    other = keeper._replace(alike=False, filled=FULL_SHARE - 0.5)
    assert find(set(), [keeper, other]).full
    assert not find(set(), [keeper, other._replace(name="another")]).full
    spare = keeper._replace(name="spare", filled=0.0)
    assert not find(set(), [keeper, other, spare]).full
    assert find(set(), [keeper, other, spare._replace(answers=False)]).full


@pytest.mark.parametrize(
    ("keeper", "seconds", "why", "may_come"),
    [
        (None, 0.0, "no keeper keeps blocks in its namespace", False),
        ({"alike": False}, 0.0, "keeper k keeps blocks of other engines only", False),
        ({"alike": False, "age": 1.0}, 0.0, "keeper k keeps blocks of other engines only", True),
        ({"answers": False}, 0.0, "keeper k does not answer", True),
        ({"answers": False}, SILENT_SECONDS, "keeper k does not answer", False),
    ],
)
def test_why_no_keeper_helps(
    keeper: dict[str, int] | None, seconds: float, why: str, may_come: bool
) -> None:
    others = [OTHER]
    if keeper is not None:
        others.append(OTHER._replace(name="k", keeps=True, **keeper))
    found = why_none(YOUNG_SECONDS, seconds, others)
    assert found.why.startswith(why)
    assert found.may_come is may_come
    assert why_none(0.0, seconds, others).may_come, "keepers look once a second"


def test_bars_fit_on_one_line() -> None:
    parts = [Part(f"engine-{number}", number, 4, 1_000_000) for number in range(4)]
    assert line(parts[:1], 80) == f"engine-0 {bar(0, 4)} 1.0 MB"
    assert line(parts[:2], 120) == ", ".join(line([each], 80) for each in parts[:2])
    assert line(parts, 80) == f"4 engines {bar(6, 16)} 4.0 MB"
    assert len(line(parts, 20)) == 19
    assert line([Part("\u4e00" * 30, 1, 2, 0)], 70)[-6:] == "0.0 MB"


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


def test_a_name_comes_before_a_pid_and_a_server_before_an_engine() -> None:
    engines = [named("1", 50), named("2", 60), named("60", 70)]
    reading = looks.node(*engines)

    def meant(wanted: str) -> list[str]:
        return [each.name for each in choose(reading, wanted, False, parents).engines]

    assert meant("1") == ["1"], "which is the pid of all their ancestor, too"
    assert meant("60") == ["60"]
    assert meant("40") == ["1", "2", "60"]
    assert meant("50") == ["1"]
    assert meant(f"{60:016x}") == ["2"]


def test_a_keeper_that_is_left_in_a_container_is_no_engine_to_be_drained() -> None:
    reading = looks.node(looks.engine(7, keeps=True, pid_here=7))
    with pytest.raises(KvshmError, match="there is no engine in this container"):
        choose(reading, None, True, parents)
    with pytest.raises(KvshmError, match="it is a keeper"):
        choose(reading, "dp7", False, parents)


def test_what_cannot_be_read_is_said() -> None:
    reading = looks.node(looks.engine(1, pid_here=50))
    (space,) = reading.namespaces
    lost = {Epoch(2): "no answer", Epoch(3): "no answer"}
    space = replace(space, unreadable=lost, pids_here={Epoch(2): 60})
    reading = replace(reading, namespaces=(space,))

    def unreachable(wanted: str | None) -> list[Epoch]:
        chosen = choose(reading, wanted, wanted is None, parents)
        return [each.epoch for each in chosen.unreachable]

    assert unreachable(None) == unreachable("40") == [2]
    assert unreachable(f"{3:016x}") == [3]
    assert unreachable("dp1") == []


def named(name: str, pid: int) -> EngineReading:
    return looks.engine(pid, name=name, label=name, pid=pid, pid_here=pid)


def parents(pid: int) -> list[int]:
    return [pid, 40, 1]


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
    outgoing: Outgoing,
    catalogue: Catalogue,
    *engines: int,
    most: int = 9,
    now: float = 0.0,
    besides: tuple[int, ...] = (),
) -> list[int]:
    """``besides``: in drain, too, but not giving away any more."""

    def is_kept(block: BlockName) -> bool:
        return KEEPER in catalogue.holders(block)

    leaving = Leaving(frozenset(engines), frozenset((*engines, *besides)))
    found = outgoing.take(most, leaving, catalogue, is_kept, Keepers(), now)
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


def test_an_engine_whose_drain_is_over_keeps_nothing_for_another_one() -> None:
    catalogue, outgoing = known(a=(put(0, 1),), b=(put(0, 1),)), Outgoing()
    assert taken(outgoing, catalogue, B) == []
    assert taken(outgoing, catalogue, B, besides=(A,)) == [1]


def test_until_no_engine_is_in_drain_what_came_from_one_stays() -> None:
    catalogue, outgoing = known(a=(put(0, 1),)), Outgoing()
    taken(outgoing, catalogue, A)
    assert outgoing.is_last(name(1), catalogue)
    assert taken(outgoing, catalogue, besides=(A,)) == []
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
        leaving, keepers = Leaving(frozenset({A}), frozenset({A})), Keepers(turn, 2)
        taking = Outgoing().take(4, leaving, catalogue, lambda _: False, keepers, 0.0)
        return set(taking)

    assert len(first(0) | first(1)) == 8
