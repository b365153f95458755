"""A look at a node: what engines hand out is what is read, now and after they have ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from kvshm._base.ids import BlockId, Epoch, Generation, LeaseBit
from kvshm._base.time_namespace import clock_offset_ns
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.progress import COORDINATOR, SCHEDULER, OwnProgress
from kvshm._shm.statistics import HOOK_ERRORS
from kvshm.tools.node.mapped import REPLICA_SECONDS
from kvshm.tools.node.reader import ENDED_SECONDS, NodeReader
from kvshm.tools.node.reading import Blocks, EngineReading, NamespaceReading

from .dumps import dies, hash_of, silent_engine
from .served import Served, ServedNode


class Clock:
    ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(served: ServedNode, clock: Clock) -> Iterator[NodeReader]:
    with NodeReader(served.run_dir, clock=clock) as reader:
        yield reader


def space(reader: NodeReader) -> NamespaceReading:
    (only,) = reader.read().namespaces
    return only


def engines(reader: NodeReader) -> dict[str, EngineReading]:
    return {engine.label: engine for engine in space(reader).engines}


def publish(engine: Served, *names: str) -> bytes:
    records = pack_records(
        [BlockRecord(hash_of(n), BlockId(i), Generation(0), i) for i, n in enumerate(names)]
    )
    engine.table.publish(records, bytes(8 * len(names)))
    return records


def test_blocks_are_counted_once_for_the_node_and_last_copies_for_each_engine(
    served: ServedNode, reader: NodeReader
) -> None:
    one, two = served.serve("one", 1), served.serve("two", 2)
    publish(one, "a", "b", "c")
    held = publish(two, "b", "d")
    two.table.set_life(0)
    two.table.lease(LeaseBit(3), held)
    two.table.retract([BlockId(1)])
    found = engines(reader)
    assert found["one"].blocks == Blocks(26, ready=3, distinct=3, last_copies=2)
    assert found["one"].blocks.duplicates == 1
    assert found["two"].blocks == Blocks(26, ready=1, draining=1, leased=2)


def test_blocks_of_an_engine_that_has_ended_count_no_more(
    served: ServedNode, reader: NodeReader
) -> None:
    one, two, three = (served.serve(name, i) for i, name in enumerate(("one", "two", "three"), 1))
    for engine in (one, two, three):
        publish(engine, "a")
    assert engines(reader)["one"].blocks == Blocks(26, ready=1, distinct=1)
    dies(two.table)
    three.table.retire()
    found = engines(reader)
    assert found["one"].blocks == Blocks(26, ready=1, distinct=1, last_copies=1)
    assert found["two"].blocks == found["three"].blocks == Blocks(26)


def test_namespaces_are_counted_apart(served: ServedNode, reader: NodeReader) -> None:
    other = ServedNode(served.run_dir, f"{served.namespace}-2")
    try:
        for node, epoch in (served, 1), (other, 2):
            publish(node.serve("e", epoch), "a")
        found = reader.read()
        assert [s.name for s in found.namespaces] == [served.namespace, other.namespace]
        assert [e.blocks.last_copies for e in found.engines] == [1, 1]
        with NodeReader(served.run_dir, served.namespace) as narrow:
            assert [s.name for s in narrow.read().namespaces] == [served.namespace]
    finally:
        other.close()


def test_a_replica_that_lacks_blocks_lags_behind_the_oldest_of_them(
    served: ServedNode, reader: NodeReader, clock: Clock
) -> None:
    exporter, importer = served.serve("exporter", 1), served.serve("importer", 2)
    known = publish(exporter, "a", "b")
    row = importer.replica.add_row(Epoch(1), "exporter", 26, LeaseBit(0))
    importer.replica.apply(row, known[: len(known) // 2])
    (peer,) = engines(reader)["importer"].peers
    assert (peer.name, peer.epoch, peer.entries, peer.lacking) == ("exporter", 1, 1, 1)
    assert peer.lag_seconds is not None
    assert peer.lag_seconds > 0
    importer.replica.apply(row, known)
    (peer,) = engines(reader)["importer"].peers
    assert (peer.lacking, peer.lag_seconds) == (0, 0.0)
    exporter.table.retract([BlockId(0)])
    publish(exporter, "c")  # in the same block, at the next generation
    (peer,) = engines(reader)["importer"].peers
    assert (peer.entries, peer.lacking) == (2, 1)


def test_a_replica_is_asked_for_again_once_it_may_have_grown(
    served: ServedNode, reader: NodeReader, clock: Clock
) -> None:
    importer = served.serve("importer", 2)
    assert engines(reader)["importer"].peers == ()
    before = reader._mapped[served.namespace, Epoch(2)].replica
    engines(reader)
    assert reader._mapped[served.namespace, Epoch(2)].replica is before
    clock.ahead = REPLICA_SECONDS + 1
    importer.replica.add_row(Epoch(1), "exporter", 26, LeaseBit(0))
    assert [peer.name for peer in engines(reader)["importer"].peers] == ["exporter"]
    assert reader._mapped[served.namespace, Epoch(2)].replica is not before


def test_a_table_is_read_on_after_its_engine_has_died_and_then_forgotten(
    served: ServedNode, reader: NodeReader, clock: Clock
) -> None:
    engine = served.serve("e", 1)
    assert not engines(reader)["e"].owner_died
    engine.table.counters.add(HOOK_ERRORS, 3)
    dies(engine.table)
    engine.crash()
    found = engines(reader)["e"]
    assert (found.owner_died, found.counters["hook_errors"]) == (True, 3)
    clock.ahead = ENDED_SECONDS + 1
    found_space = space(reader)
    assert (found_space.engines, found_space.ended) == ((), (1,)), "only its socket is left"


def test_an_engine_that_ended_before_the_first_look_has_left_a_socket(
    served: ServedNode, reader: NodeReader
) -> None:
    served.serve("e", 1).crash()
    assert (space(reader).engines, space(reader).ended) == ((), (1,))


def test_the_coordinator_shows_an_engine_that_does_not_answer(
    served: ServedNode, reader: NodeReader
) -> None:
    table = served.serve("e", 1)
    table.close_server()
    served.enlist(table.table)
    with silent_engine(served, 1):
        found = engines(reader)["e"]
        assert not found.answers
        assert found.joined


def test_an_engine_that_no_one_shows_is_unreadable(served: ServedNode, reader: NodeReader) -> None:
    with silent_engine(served, 1):
        found = space(reader)
        assert found.engines == ()
        assert list(found.unreadable) == [1]
        assert "no answer within" in found.unreadable[Epoch(1)]


def test_an_epoch_that_has_ended_gives_way_to_the_next(
    served: ServedNode, reader: NodeReader
) -> None:
    first = served.serve("e", 1)
    assert engines(reader)["e"].epoch == 1
    first.table.retire()
    assert engines(reader)["e"].retired, "until another epoch begins"
    served.serve("e", 2)
    assert [e.epoch for e in space(reader).engines] == [2]


def test_engines_of_one_name_get_labels_of_their_own(
    served: ServedNode, reader: NodeReader
) -> None:
    served.serve("vllm-1", 1, pid=7)
    served.serve("vllm-1", 2, pid=8)
    served.serve("other", 3)
    assert {*engines(reader)} == {"vllm-1-0000000000000001", "vllm-1-0000000000000002", "other"}


def test_no_label_changes_when_others_of_the_name_come_and_go(
    served: ServedNode, reader: NodeReader
) -> None:
    def labels() -> dict[int, str]:
        return {engine.epoch: engine.label for engine in space(reader).engines}

    first = served.serve("e", 1, pid=7)
    assert labels() == {1: "e"}
    other = served.serve("e", 2, pid=8)
    assert labels() == {1: "e", 2: "e-0000000000000002"}
    dies(first.table)
    assert labels() == {1: "e", 2: "e-0000000000000002"}
    served.serve("e", 3, pid=9)
    three = {1: "e", 2: "e-0000000000000002", 3: "e-0000000000000003"}
    assert labels() == three
    dies(other.table)
    assert labels() == three


def test_an_engine_that_is_started_again_has_its_label(
    served: ServedNode, reader: NodeReader
) -> None:
    first = served.serve("e", 1, pid=7)
    assert {*engines(reader)} == {"e"}
    dies(first.table)
    served.serve("e", 2, pid=8)
    assert {label: engine.epoch for label, engine in engines(reader).items()} == {
        "e": 2,
        "e-0000000000000001": 1,
    }


def test_whether_the_coordinator_goes_round_is_seen_in_the_tables_of_its_roster(
    served: ServedNode, reader: NodeReader, clock: Clock
) -> None:
    member = served.serve("member", 1).table
    served.serve("stranger", 2)
    served.enlist(member)
    found = space(reader)
    assert (found.coordinated, found.coordinator_answers, found.coordinator_ns) == (True, True, 0)
    assert [(e.label, e.joined) for e in found.engines] == [("member", True), ("stranger", False)]
    member.coordinator_went_round(clock_offset_ns())
    found = space(reader)
    assert found.coordinator_ns is not None
    assert abs(found.coordinator_ns / 1e9 - time.monotonic()) < 60
    clock.ahead = 100
    assert space(reader).coordinator_answers, "asked, because it has not gone round lately"


def test_a_coordinator_that_has_never_shown_itself_is_asked_even_right_after_the_clock_began(
    served: ServedNode, reader: NodeReader, clock: Clock
) -> None:
    """As in a time namespace that has just begun, or after the boot."""
    served.enlist(served.serve("member", 1).table)
    served.serve("stranger", 2)
    clock.ahead = 2.0 - time.monotonic()
    joined = {e.label: e.joined for e in space(reader).engines}
    assert joined == {"member": True, "stranger": False}


HOURS = 40_000 * 10**9


@pytest.mark.parametrize("own", [0, -150 * 10**9, HOURS])
@pytest.mark.parametrize("theirs", [0, -200 * 10**9, HOURS])
def test_times_of_other_time_namespaces_are_converted(
    served: ServedNode, own: int, theirs: int
) -> None:
    """Engine and coordinator in one, the reader in another."""
    machine = HOURS + 1000 * 10**9
    table = served.serve("e", 1).table
    served.enlist(table)
    table.loops = OwnProgress(table._segment, lambda: machine + theirs, lambda: theirs)
    table.beat()
    table._ticks = lambda: machine + theirs - 10**9  # type: ignore[method-assign]
    assert table.take_ticket(1) is not None
    coordinator = OwnProgress(table._segment, lambda: machine + theirs, lambda: theirs)
    coordinator.went_round(COORDINATOR)
    now = machine + own + 10**9
    with NodeReader(served.run_dir, clock=lambda: now / 1e9, clock_offset=lambda: own) as reader:
        found = space(reader)
    (engine,) = found.engines
    assert engine.clock_known
    assert {loop.last_ns for loop in engine.progress if loop.loop == "client"} == {now - 10**9}
    assert engine.loads_since == (now - 2 * 10**9,)
    assert (found.coordinator_ns, engine.joined) == (now - 10**9, True)


@pytest.mark.parametrize(
    ("own", "theirs", "ahead"),
    [(None, 0, 0), (0, None, 0), (0, 0, 5 * 10**9)],
    ids=["the reader's", "the engine's", "an offset that cannot be right"],
)
def test_times_that_cannot_be_converted_are_marked(
    served: ServedNode, own: int | None, theirs: int | None, ahead: int
) -> None:
    now = 1000 * 10**9
    table = served.serve("e", 1).table
    served.enlist(table)
    table.loops = OwnProgress(table._segment, lambda: now + ahead, lambda: theirs)
    table.beat()
    OwnProgress(table._segment, lambda: now + ahead, lambda: theirs).went_round(COORDINATOR)
    with NodeReader(served.run_dir, clock=lambda: now / 1e9, clock_offset=lambda: own) as reader:
        found = space(reader)
    (engine,) = found.engines
    assert not engine.clock_known
    assert found.coordinator_ns is None
    assert (found.coordinator_answers, engine.joined) == (True, True), "it is asked instead"


def test_progress_and_life_are_read(served: ServedNode, reader: NodeReader) -> None:
    table = served.serve("e", 1, num_ranks=2).table
    table.set_life(1)
    table.loops.set_pending(SCHEDULER, 4)
    found = engines(reader)["e"]
    assert found.life == (False, True)
    assert [(loop.loop, loop.pending) for loop in found.progress] == [
        ("scheduler", 4),
        ("client", 0),
        ("loads of rank 0", 0),
        ("loads of rank 1", 0),
    ]


def test_no_directory_is_a_node_without_engines(served: ServedNode) -> None:
    with NodeReader(served.run_dir / "none") as reader:
        assert reader.read().namespaces == ()


def test_the_pid_that_this_process_sees(served: ServedNode, reader: NodeReader) -> None:
    served.serve("e", 1, pid=99999)
    found = engines(reader)["e"]
    assert (found.pid, found.pid_here) == (99999, os.getpid())
    assert "e" in found.names
    assert "99999" in found.names
    assert "0x0000000000000001" in found.names
    assert "1" not in found.names
