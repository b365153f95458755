"""``kvshm drain``: what only the engine in drain has comes to a keeper; it imports nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvshm import Reader, _native
from kvshm._shm.layout import IN_DRAIN_OFFSET

from .joined import Toy, Toys, served
from .keepers import WIDE, Keeper, imports, kvshm, prompt
from .processes import PATIENCE_SECONDS, Managed, Node, wait_until

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def place() -> Iterator[Node]:
    """A node of its own: a keeper keeps blocks of all engines there."""
    with served() as node:
        yield node


def drained(place: Node, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = kvshm(place, "drain", "--json", *arguments)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def full(place: Node, toy: Toy, blocks: int) -> Keeper:
    """A keeper that is full of prompts of this engine, each used once."""
    keeper = Keeper(place, blocks)
    for number in range(blocks // 6):
        keys = prompt(toy, b"filler %d" % number)
        toy.compute(keys, range(6 * number, 6 * number + 6))
        keeper.wait_for(keys)
    return keeper


def test_a_full_keeper_gets_what_was_used_once_and_the_engine_imports_nothing(
    place: Node, toys: Toys
) -> None:
    a, b = toys.pair()
    keeper = full(place, b, 12)
    last = prompt(a, b"last")
    a.compute(last, range(6))
    fillers = prompt(a, b"filler 0")
    a.node.wait_for(fillers, 60)
    assert not any(keeper.has(last))
    status, (found,) = drained(place, "a")
    assert (status, found["end"], found["left"]) == (0, "kept", 0)
    assert found["alone"] == found["kept"] == 6
    assert found["kept_bytes"] > 0
    assert keeper.has(last) == [True] * 6
    before = a.node.stats()["miss_in_drain"]
    assert not a.node.lookup(fillers)
    assert a.node.stats()["miss_in_drain"] == before + 1
    assert "in drain" not in kvshm(place, "status").stderr
    shown = json.loads(kvshm(place, "status", "--json").stdout)["namespaces"][0]["engines"]
    assert {e["engine"].partition("-")[0]: e["in_drain"] for e in shown} == {
        "a": True,
        "b": False,
        "keeper": False,
    }
    a.node.close()
    imports(b, last)


def test_the_pid_of_a_server_means_all_engines_that_it_has_started(place: Node, toys: Toys) -> None:
    a, b = toys.pair()
    Keeper(place)
    status, found = drained(place, str(os.getppid()))
    assert (status, [each["engine"] for each in found]) == (0, ["a", "b"])
    assert in_drain(a)
    assert in_drain(b)


def test_undone_it_imports_again(place: Node, toys: Toys) -> None:
    a, b = toys.pair()
    keys = prompt(b, b"1")
    b.compute(keys, range(6))
    a.node.wait_for(keys, 60)
    assert kvshm(place, "drain", "a").returncode == 0
    assert not a.node.lookup(keys)
    done = kvshm(place, "drain", "--undo", "a")
    assert (done.returncode, done.stdout) == (0, "a imports again\n")
    assert a.node.lookup(keys).length == 6


def test_what_a_full_keeper_has_of_the_engine_stays(place: Node, toys: Toys) -> None:
    a, b = toys.pair()
    keeper = full(place, b, 6)
    hot, cold = prompt(a, b"hot"), prompt(a, b"cold")
    a.compute(hot, range(6))
    b.compute(hot, range(6, 12))
    keeper.wait_for(hot)
    b.node.retract(range(6, 12))
    a.compute(cold, range(6, 12))
    status, (found,) = drained(place, "a")
    assert (status, found["end"], found["left"]) == (1, "stalled", 6)
    assert keeper.has(hot) == [True] * 6
    assert not any(keeper.has(cold))


def test_no_more_is_copied_than_is_allowed(place: Node, toys: Toys) -> None:
    a, b = toys.pair()
    keeper = full(place, b, 24)
    last = [key for number in range(4) for key in prompt(a, b"%d" % number)]
    for number in range(4):
        a.compute(last[6 * number : 6 * number + 6], range(6 * number, 6 * number + 6))
    status, (found,) = drained(place, "a", "--bytes", "1")
    assert (status, found["end"]) == (1, "bytes") if found["left"] else (0, "kept")
    assert found["kept"] == sum(keeper.has(last)) >= 1


def test_without_a_keeper_it_says_what_is_lost(place: Node, toys: Toys) -> None:
    a, b = toys.pair()
    only, both = prompt(a, b"1"), prompt(a, b"2")
    a.compute(only, range(6))
    a.compute(both, range(6, 12))
    b.compute(both, range(6))
    done = kvshm(place, "drain", "a")
    assert done.returncode == 1
    assert ", 6 (" in done.stdout
    assert "no keeper keeps blocks in its namespace" in done.stdout
    assert not a.node.lookup(both)


def test_engines_that_are_stopped_together_keep_nothing_for_each_other(
    place: Node, toys: Toys
) -> None:
    a, b = toys.pair()
    both = prompt(a, b"both")
    a.compute(both, range(6))
    b.compute(both, range(6))
    status, found = drained(place, "--here")
    assert (status, [each["end"] for each in found]) == (1, ["no-keeper"] * 2)
    assert [each["left"] for each in found] == [6, 6]
    assert in_drain(a)
    assert in_drain(b)


def in_drain(toy: Toy) -> bool:
    return toy.table.in_drain


def begun(place: Node, *arguments: str) -> Managed:
    where = ("--run-dir", str(place.run_dir), "--namespace", place.namespace)
    command = ("-P", "-m", "kvshm.tools.cli", "drain", "--json", *arguments)
    return place.processes.python("drain", *command, *where)


def wait_for_a_look(toy: Toy) -> None:
    """Until the command has seen what the engine has.  At each look it asks keepers again to copy,
    if another command for the engine has ended: as this here seems to be."""
    _native.store(toy.table._segment.buffer, IN_DRAIN_OFFSET, 1)
    wait_until(lambda: toy.table.gives_away, "it has looked")


@pytest.mark.parametrize(
    "happens", ["the engine ends", "the keeper ends", "it is interrupted", "it is killed"]
)
def test_what_happens_meanwhile_ends_it(place: Node, toys: Toys, happens: str) -> None:
    a, b = toys.pair()
    keeper = full(place, b, 6)
    a.compute(prompt(a, b"last"), range(6))
    keeper.process.signal(signal.SIGSTOP)
    process = begun(place, "a", "--seconds", "60")
    wait_until(lambda: a.table.gives_away, "it has begun")
    wait_for_a_look(a)
    if happens == "the engine ends":
        a.node.close()
        end = "gone"
    elif happens == "the keeper ends":
        keeper.process.kill()
        end = "no-keeper"
    elif happens == "it is interrupted":
        process.signal(signal.SIGINT)
        end = "interrupted"
    else:
        process.kill()
        assert a.table.gives_away
        assert in_drain(a)
        return
    assert process.wait() == 1
    (found,) = json.loads(str(process.out))
    assert (found["end"], found["left"]) == (end, 6)
    if end != "gone":
        assert in_drain(a)
        assert not a.table.gives_away


def test_a_command_that_was_killed_has_keepers_copy_for_its_time_only(
    place: Node, toys: Toys
) -> None:
    a, b = toys.pair()
    keeper = full(place, b, 6)
    a.compute(prompt(a, b"last"), range(6))
    keeper.process.signal(signal.SIGSTOP)
    process = begun(place, "a", "--seconds", "1")
    wait_until(lambda: a.table.gives_away, "it has begun")
    process.kill()
    wait_until(lambda: not a.table.gives_away, "its time is over")
    assert a.table.in_drain


SLOW = ("--rate", "80K")
"""A block in six seconds and a half."""


def slow(place: Node) -> Keeper:
    keeper = Keeper(place, 1000, *SLOW)
    keeper.process.wait_out(lambda line: line.startswith("keeping blocks of"))
    return keeper


def test_a_slow_keeper_has_the_time_that_was_given(place: Node, toys: Toys) -> None:
    a = toys.join("a")
    keeper, keys = slow(place), prompt(a, b"1", 3)
    a.compute(keys, range(3))
    status, (found,) = drained(place, "a", "--seconds", "60")
    assert (status, found["end"], found["left"]) == (0, "kept", 0)
    assert all(keeper.has(keys))


def test_an_engine_waits_while_keepers_copy_of_another_one(place: Node, toys: Toys) -> None:
    a, b = toys.pair()
    keeper = Keeper(place, 1000, "--rate", "512K")  # a block in a second
    keeper.process.wait_out(lambda line: line.startswith("keeping blocks of"))
    first, later = prompt(a, b"a", 9), prompt(b, b"b", 11)
    a.compute(first, range(9))
    b.compute(later, [0], 10)
    status, found = drained(place, "--here", "--seconds", "60")
    assert (status, [each["end"] for each in found]) == (0, ["kept", "kept"])
    assert keeper.has(first + later[10:]) == [True] * 10


def test_what_is_undone_meanwhile_ends_at_once_and_stays_so(place: Node, toys: Toys) -> None:
    a = toys.join("a")
    slow(place)
    a.compute(prompt(a, b"1"), range(6))
    process = begun(place, "a", "--seconds", "60")
    wait_until(lambda: a.table.gives_away, "it has begun")
    assert kvshm(place, "drain", "--undo", "a").returncode == 0
    assert process.wait() == 3
    (found,) = json.loads(str(process.out))
    assert (found["end"], found["why"]) == ("undone", "undone meanwhile (--undo): it imports again")
    assert not in_drain(a)


def test_of_two_commands_for_an_engine_the_one_that_ends_stops_no_copies(
    place: Node, toys: Toys
) -> None:
    a = toys.join("a")
    slow(place)
    a.compute(prompt(a, b"1"), range(6))
    word = a.table._load
    first = begun(place, "a", "--seconds", "30")
    wait_until(lambda: a.table.gives_away, "the first has begun")
    asked = word(IN_DRAIN_OFFSET)
    second = begun(place, "a", "--seconds", "60")
    wait_until(lambda: word(IN_DRAIN_OFFSET) != asked, "the second has begun")
    first.signal(signal.SIGINT)
    assert first.wait() == 1
    assert a.table.gives_away
    second.signal(signal.SIGINT)
    assert second.wait() == 1
    assert not a.table.gives_away
    assert in_drain(a)


def test_what_two_engines_have_is_kept_if_one_is_drained_after_the_other(
    place: Node, toys: Toys
) -> None:
    """Both are still there: the first one's drain has ended, and it ends its last requests."""
    a, b = toys.pair()
    keeper, before, both = slow(place), prompt(a, b"before", 8), prompt(a, b"both", 1)
    toys.join("c").compute(before, range(8))
    keeper.wait_for(before[:1])  # it has heard of all of them, and they come first
    a.compute(both, [0])
    b.compute(both, [0])
    assert drained(place, "a")[0] == 0
    status, (found,) = drained(place, "b", "--seconds", "25")
    assert (status, found["end"]) == (0, "kept")
    assert keeper.has(both) == [True]


ENGINE = """
import sys, kvshm
config = kvshm.Config(run_dir=sys.argv[1], namespace=sys.argv[2])
node = kvshm.join(
    kvshm.Identity(engine="toy 1", model="m", weights=sys.argv[3]),
    memory=kvshm.allocate(256 * 32, config), regions=[kvshm.Region(0, 256, 256, 32)],
    block_size=4, config=config, name="hangs",
)
assert node.wait_joined(60)
node.publish(list(node.keys(range(24), b"hangs")), list(range(6)))
print("joined", flush=True)
input()
"""


def hung(place: Node, kind: str) -> Managed:
    """An engine with six blocks, in a process that is stopped."""
    process = place.processes.python("hangs", "-c", ENGINE, *_where(place), kind)
    process.wait_out(lambda line: line == "joined")
    process.signal(signal.SIGSTOP)
    wait_until(lambda: process.is_stopped, "it is stopped")
    return process


def _where(place: Node) -> tuple[str, str]:
    return str(place.run_dir), place.namespace


@pytest.mark.parametrize("coordinated", [True, False])
def test_an_engine_that_hangs_keeps_no_other_one_from_being_drained(
    place: Node, toys: Toys, coordinated: bool
) -> None:
    a = toys.join("a")
    keeper, keys = Keeper(place), prompt(a, b"1")
    keeper.process.wait_out(lambda line: line.startswith("keeping blocks of"))
    hangs = hung(place, a.kind)
    a.compute(keys, range(6))
    if not coordinated:  # nor does anybody hear of what is computed later
        keeper.wait_for(keys)
        (coordinator,) = [p for p in place.processes._all if p.name == "coordinator"]
        coordinator.kill()
    status, found = drained(place, "--here")
    of_a, of_it = sorted(found, key=lambda each: each["pid"] == hangs.pid)
    assert (of_a["engine"], of_a["end"], in_drain(a)) == ("a", "kept", True)
    assert all(keeper.has(keys))
    if coordinated:  # which shows its table; keepers read its memory until it is suspected
        assert (of_it["engine"], of_it["end"]) in [("hangs", "kept"), ("hangs", "silent")]
        assert status == (of_it["end"] != "kept")
    else:
        assert (status, of_it["end"]) == (1, "failed")
        assert "no answer" in of_it["why"]
    hangs.signal(signal.SIGCONT)


def test_a_name_that_is_a_number_is_no_pid(place: Node, toys: Toys) -> None:
    engines = [toys.join(name) for name in ("0", "1", "2")]
    drained(place, "1")
    assert [in_drain(each) for each in engines] == [False, True, False]
    assert kvshm(place, "drain", "--undo", "1").stdout == "1 imports again\n"
    assert not any(map(in_drain, engines))


def test_a_keeper_gets_to_know_an_engine_that_has_just_joined(place: Node, toys: Toys) -> None:
    keeper = Keeper(place)
    a = toys.join("a")
    keys = prompt(a, b"1")
    a.compute(keys, range(6))
    status, (found,) = drained(place, "a")
    assert (status, found["end"], found["left"]) == (0, "kept", 0)  # some may be kept before it
    assert all(keeper.has(keys))


def test_a_keeper_that_leaves_an_engine_out_is_named(place: Node, toys: Toys) -> None:
    keeper = Keeper(place, 1, "--name", "cellar")
    toys.join("small")
    keeper.process.wait_out(lambda line: line.startswith("keeping blocks of 4096"))
    wide = toys.join("wide", regions=WIDE, kind="wide")
    wide.node.publish(list(wide.node.keys(range(4), b"")), [0])
    status, (found,) = drained(place, "wide")
    assert (status, found["end"], found["left"]) == (1, "no-keeper", 1)
    assert found["why"].startswith("keeper cellar keeps blocks of other engines only")


def test_a_holder_that_does_not_answer_has_no_copy(place: Node, toys: Toys) -> None:
    a = toys.join("a")
    keeper, keys = Keeper(place, 1000, "--name", "cellar"), prompt(a, b"1")
    a.compute(keys, range(6))
    keeper.wait_for(keys)
    keeper.process.signal(signal.SIGSTOP)
    wait_until(lambda: keeper.process.is_stopped, "it is stopped")
    status, (found,) = drained(place, "a")
    assert (status, found["end"], found["left"]) == (1, "no-keeper", 6)
    assert found["why"] == "keeper cellar does not answer"
    keeper.process.signal(signal.SIGCONT)


def test_on_a_terminal_its_bar_gives_way_to_what_it_says(place: Node, toys: Toys) -> None:
    a = toys.join("a")
    slow(place)
    a.compute(prompt(a, b"1"), range(6))
    command = [sys.executable, "-P", "-m", "kvshm.tools.cli", "drain", "a", "--run-dir"]
    command += [str(place.run_dir), "--namespace", place.namespace]
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as process:
        shown = b""
        while b"a [" not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 1
    last = os.read(ours, 4096)
    assert re.search(rb"\r\x1b\[Ka: \d blocks .*: interrupted\r\n$", last), last
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (("nobody",), 4, "no engine is called 'nobody'"),
        ((), 2, "one of the arguments"),
        (("a", "--here"), 2, "not allowed with"),
        (("a", "--seconds", "0"), 2, "above 0, below an hour"),
        (("a", "--bytes", "many"), 2, "'many' is not a size"),
    ],
)
def test_a_wrong_command_line_is_refused(
    place: Node, toys: Toys, arguments: tuple[str, ...], status: int, why: str
) -> None:
    a = toys.join("a")
    done = kvshm(place, "drain", *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert why in done.stderr
    assert not in_drain(a)


def test_a_keeper_is_not_drained(place: Node, toys: Toys) -> None:
    a = toys.join("a")
    keeper = Keeper(place)
    keeper.process.wait_out(lambda line: line.startswith("keeping blocks of"))
    assert a.node.joined
    done = kvshm(place, "drain", str(keeper.process.pid))
    assert done.returncode == 1
    assert "it is a keeper" in done.stderr
    with Reader(a.config) as reader:
        assert len(reader.engines()) == 2
