"""``kvshm keeper`` as a process beside engines without a model: what it keeps, lets go, survives.

A block takes a page of its memory, which so is a number of blocks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm import Config, Group, LoadState, Reader

from .joined import TOKENS, Toy, Toys, ended, served
from .keepers import WIDE, Keeper, imports, kvshm, prompt
from .processes import PATIENCE_SECONDS, Node, wait_until

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def place() -> Iterator[Node]:
    """A node of its own: a keeper keeps blocks of all engines there."""
    with served() as node:
        yield node


def owners(toy: Toy, keys: list[bytes]) -> set[str]:
    return {owner.name for owner in toy.node.lookup(keys).owners}


def test_it_keeps_what_engines_lose_and_what_they_had_when_all_are_gone(
    place: Node, toys: Toys
) -> None:
    keeper = Keeper(place)
    a = toys.join("a")
    keeper.process.wait_out(lambda line: line.startswith("keeping blocks of"))
    first, second = prompt(a, b"1"), prompt(a, b"2")
    a.compute(first, range(6))
    keeper.wait_for(first)
    a.node.retract(range(6))
    a.compute(second, range(6))
    keeper.wait_for(second)
    imports(a, first)
    a.node.close()
    b = toys.join("b")
    imports(b, first)
    imports(toys.join("c"), second)
    assert keeper.process.terminate() == 0


def test_it_hears_of_what_was_there_before_it(place: Node, toys: Toys) -> None:
    a = toys.join("a")
    keys = prompt(a, b"1")
    a.compute(keys, range(6))
    Keeper(place).wait_for(keys)


def test_blocks_of_all_groups_are_kept(place: Node, toys: Toys) -> None:
    groups = (Group(0, TOKENS), Group(1, TOKENS, window=2 * TOKENS))
    keeper = Keeper(place)
    a = toys.join("a", groups=groups)
    keys = prompt(a, b"1")
    a.compute(keys, range(6))
    for block, index in ((10, 4), (11, 5)):
        a.write(block, keys[index])
        a.node.publish(keys[: index + 1], [block], index, group=1)
    keeper.wait_for(keys)
    keeper.wait_for(keys[4:], group=1)
    a.node.close()
    b = toys.join("b", groups=groups)
    found = b.node.wait_for(keys, PATIENCE_SECONDS)
    load = ended(b.node.load(found, range(20, 28)))
    assert load.state is LoadState.DONE
    assert b.holds(range(20, 28), [*keys, *keys[4:]]) == [True] * 8


def test_when_it_is_full_only_what_was_used_twice_comes_and_what_was_not_used_goes(
    place: Node, toys: Toys
) -> None:
    keeper = Keeper(place, 12)
    a, b = toys.pair()
    old, hot, once, twice = (prompt(a, salt) for salt in (b"old", b"hot", b"once", b"twice"))
    for keys, first in ((old, 0), (hot, 6)):
        a.compute(keys, range(first, first + 6))
        keeper.wait_for(keys)
    b.compute(hot, range(6))  # as an import publishes it
    a.compute(once, range(12, 18))
    a.compute(twice, range(18, 24))
    b.compute(twice, range(6, 12))
    keeper.wait_for(twice)
    assert keeper.has(hot) == [True] * 6
    assert not any(keeper.has(old) + keeper.has(once))


def test_a_cold_prompt_loses_its_end_first(place: Node, toys: Toys) -> None:
    keeper = Keeper(place, 8)
    a, b = toys.pair()
    cold, twice = prompt(a, b"cold", 8), prompt(a, b"twice", 3)
    a.compute(cold, range(8))
    keeper.wait_for(cold)
    a.compute(twice, range(8, 11))
    b.compute(twice, range(3))
    keeper.wait_for(twice)
    assert keeper.has(cold) == [True] * 5 + [False] * 3
    assert keeper.metric("keeper") == 1
    assert keeper.metric("published_blocks") == 8
    assert keeper.metric("blocks_evicted_total") == 3
    assert 0 < keeper.metric("evicted_age_seconds_total") < 3 * PATIENCE_SECONDS


def test_top_shows_what_its_memory_is_good_for(place: Node, toys: Toys) -> None:
    keeper = Keeper(place, 8)
    a, b = toys.pair()
    cold, twice = prompt(a, b"cold", 8), prompt(a, b"twice", 3)
    a.compute(cold, range(8))
    keeper.wait_for(cold)
    a.compute(twice, range(8, 11))
    b.compute(twice, range(3))
    keeper.wait_for(twice)
    a.node.retract(range(8))
    imports(b, cold[:5])
    view = json.loads(kvshm(place, "top", "--once", "--json").stdout)
    (shown,) = view["keepers"]
    assert shown["pid"] == keeper.process.pid
    assert (shown["filled_share"], shown["hit_rate"]) == (1.0, pytest.approx(5 / 11))
    assert 0 < shown["dropped_after_seconds"] < PATIENCE_SECONDS
    engines = {each["pid"]: each for each in view["engines"] if each["keeps"]}
    assert engines.keys() == {keeper.process.pid}
    (engine,) = engines.values()
    assert (engine["duplicate_blocks"], engine["last_copy_blocks"]) == (3, 5)


def test_a_second_keeper_keeps_what_the_first_has_no_room_for_and_takes_over(
    place: Node, toys: Toys
) -> None:
    a = toys.join("a")
    first = Keeper(place, 4)
    first.process.wait_out(lambda line: line.startswith("keeping blocks of"))
    keys = prompt(a, b"1", 4)
    a.compute(keys, range(4))
    first.wait_for(keys)
    second = Keeper(place, 1000)
    more = prompt(a, b"2", 4)
    a.compute(more, range(4, 8))
    second.wait_for(more)
    assert not any(second.has(keys))
    assert not any(first.has(more))
    first.process.kill()
    second.wait_for(keys)
    a.node.close()
    imports(toys.join("b"), more)


@pytest.mark.parametrize("leaves", [False, True], ids=["it goes on", "it leaves"])
def test_what_an_engine_withdraws_while_it_goes_on_is_not_kept(
    place: Node, toys: Toys, leaves: bool
) -> None:
    """Its contents may be wrong: a reset of the engines has to be enough to be rid of them.  What
    another engine has computed stays."""
    a, b = toys.pair()
    keeper = Keeper(place)
    wrong, right = prompt(a, b"1"), prompt(a, b"2")
    a.compute(wrong, range(6))
    b.compute(right, range(6))
    keeper.wait_for(wrong + right)
    if leaves:
        a.node.close()
        wait_until(lambda: "a" not in names_of(place), "it is gone")
        more = prompt(b, b"3")
        b.compute(more, range(6, 12))  # the keeper has heard of the end before it hears of this
        keeper.wait_for(more)
        assert keeper.has(wrong) == [True] * 6
    else:
        b.node.wait_for(wrong, PATIENCE_SECONDS)
        a.node.reset()
        wait_until(lambda: not any(keeper.has(wrong)), "it has dropped them")
        wait_until(lambda: not b.node.lookup(wrong), "engines have heard, though it copies nothing")
        assert keeper.metric("blocks_evicted_total") == 0, "nothing needed their place"
    assert keeper.has(right) == [True] * 6


def names_of(place: Node) -> list[str]:
    with Reader(Config(run_dir=str(place.run_dir), namespace=place.namespace)) as reader:
        return [view.name for view in reader.engines()]


def test_what_kills_it_costs_no_byte_and_leaves_nothing(place: Node, toys: Toys) -> None:
    """An engine is copying from it; then another keeper starts with nothing."""
    a = toys.join("a")
    keys = prompt(a, b"1")
    keeper = Keeper(place)
    a.compute(keys, range(6))
    keeper.wait_for(keys)
    a.node.close()
    b = toys.join("b")
    found = b.node.wait_for(keys, PATIENCE_SECONDS)
    with b.copies_held_up():
        load = b.node.load(found, range(20, 26))
        b.wait_until_copying()
        keeper.process.kill()
    assert (ended(load).state, load.good) == (LoadState.FAILED, 0)
    wait_until(lambda: not b.node.lookup(keys), "it is not asked any more")
    again = Keeper(place)
    b.compute(keys, range(6))
    again.wait_for(keys)
    assert again.process.terminate() == 0
    b.node.close()
    wait_until(lambda: not place.sockets(), "nothing is left")


def test_a_stopped_keeper_holds_up_no_one_and_goes_on(place: Node, toys: Toys) -> None:
    a, b = toys.pair()
    keys, more = prompt(a, b"1"), prompt(a, b"2")
    keeper = Keeper(place)
    a.compute(keys, range(6))
    keeper.wait_for(keys)
    a.node.retract(range(6))
    imports(b, keys)
    keeper.process.signal(signal.SIGSTOP)
    wait_until(lambda: keeper.process.is_stopped, "it is stopped")
    a.compute(more, range(6))
    if found := b.node.lookup(keys):  # its memory can be read until the coordinator suspects it
        assert ended(b.node.load(found, range(10, 16))).state is LoadState.DONE
        assert b.holds(range(10, 16), keys) == [True] * 6
    a.node.retract([0])
    assert a.node.stats()["forced"] == 0
    keeper.process.signal(signal.SIGCONT)
    keeper.wait_for(more[1:])
    assert keeper.process.terminate() == 0


def test_engines_never_wait_for_it(place: Node, toys: Toys) -> None:
    """It takes no lease, however busy it is."""
    a = toys.join("a")
    keeper = Keeper(place, 1000)
    rounds = [prompt(a, b"%d" % n) for n in range(40)]
    for keys in rounds:
        a.compute(keys, range(6))
        wait_until(lambda keys=keys: any(keeper.has(keys)), "it begins to copy")
        a.node.retract(range(6))
    stats = a.node.stats()
    assert (stats["drained"], stats["forced"]) == (0, 0)


def test_a_coordinator_that_comes_again_finds_it(place: Node, toys: Toys) -> None:
    a = toys.join("a")
    keys, more = prompt(a, b"1"), prompt(a, b"2")
    keeper = Keeper(place)
    a.compute(keys, range(6))
    keeper.wait_for(keys)
    (coordinator,) = [p for p in place.processes._all if p.name == "coordinator"]
    coordinator.kill()
    place.coordinator()
    b = toys.join("b")
    a.node.retract(range(6))
    imports(b, keys)
    a.compute(more, range(6))
    keeper.wait_for(more)


def test_status_and_readers_show_it_as_what_it_is(place: Node, toys: Toys) -> None:
    a = toys.join("a")
    keys = prompt(a, b"1")
    keeper = Keeper(place, 1000, "--name", "cellar")
    a.compute(keys, range(6))
    keeper.wait_for(keys)
    found = kvshm(place, "status", "--json")
    (space,) = json.loads(found.stdout)["namespaces"]
    shown = {each["engine"]: each for each in space["engines"]}
    assert (shown["cellar"]["keeps"], shown["a"]["keeps"]) == (True, False)
    assert (shown["cellar"]["state"], shown["cellar"]["published"]) == ("healthy", 6)
    rows = kvshm(place, "status").stdout.splitlines()
    (line,) = [row.split() for row in rows if "cellar" in row]
    assert "keeper" in line


def test_what_it_cannot_keep_it_says_once(place: Node, toys: Toys) -> None:
    """Blocks that are larger than all its memory; it goes on looking."""
    keeper = Keeper(place, 1)
    toys.join("wide", regions=WIDE, kind="wide")
    keeper.process.wait_out(
        lambda line: "nothing of engine wide: a block has 8192 bytes, all memory 4096" in line
    )
    toys.join("small")
    keeper.process.wait_out(lambda line: line.startswith("keeping blocks of 4096"))
    assert len(keeper.process.out.matching(lambda line: "wide" in line)) == 1


LIES = {
    "no ranks": "encode(replace(info, ranks=[]))",
    "no bytes": "encode(replace(info, ranks=[of_size(info.ranks[0], 0)]))",
    "less than none": "encode(replace(info, ranks=[of_size(info.ranks[0], -4096)]))",
    "more than there is": "encode(replace(info, ranks=[of_size(info.ranks[0], 1 << 62)]))",
    "another's epoch": "encode(replace(info, epoch=info.epoch ^ 2))",
    "other fields": "encode(replace(info, fields={'x': 'y'}))",
    "no message": "bytes(7)",
    "a huge one": "bytes(1 << 24)",
}
LIAR = """
import sys, kvshm
from msgspec.structs import replace
from kvshm._node import segment_server
encode = segment_server.encode_info
def of_size(rank, size):
    regions = [replace(region, block_bytes=size) for region in rank.memory.regions]
    return replace(rank, memory=replace(rank.memory, regions=regions))
segment_server.encode_info = lambda info: {lie}
config = kvshm.Config(run_dir=sys.argv[1], namespace=sys.argv[2])
node = kvshm.join(
    kvshm.Identity(engine="e", model="m", weights="liar"), memory=kvshm.allocate(4096, config),
    regions=[kvshm.Region(0, 4096, 4096, 1)], block_size=4, config=config, name="liar",
)
assert node.wait_joined(60)
print("joined", flush=True)
input()
"""


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_engine_that_describes_itself_wrongly_is_left_out(
    place: Node, toys: Toys, lie: str
) -> None:
    """In a process of its own, which hands out a wrong entry of the roster."""
    where = (str(place.run_dir), place.namespace)
    liar = place.processes.python("liar", "-c", LIAR.format(lie=lie), *where)
    liar.wait_out(lambda line: line == "joined")
    keeper = Keeper(place)
    keeper.process.wait_out(lambda line: line.startswith("keeping nothing of engine liar: "))
    honest = toys.join("a")
    keys = prompt(honest, b"1")
    honest.compute(keys, range(6))
    keeper.wait_for(keys)
    assert keeper.process.terminate() == 0
    assert not keeper.process.err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--memory", "lots"), "is not a size like 8G"),
        (("--memory", "100T"), "are available"),
        (("--memory", "1"), "a page has"),
        (("--memory", "1M", "--name", "x" * 65), "over 64 bytes"),
        (("--memory", "1M", "--give-way-after", "-1"), "of at least 0 seconds"),
        ((), "the following arguments are required: --memory"),
    ],
)
def test_a_wrong_command_line_is_refused(place: Node, arguments: tuple[str, ...], why: str) -> None:
    done = kvshm(place, "keeper", *arguments)
    assert done.returncode == (1 if "100T" in arguments else 2)
    assert why in done.stderr


def test_its_memory_is_taken_from_one_numa_node(place: Node) -> None:
    keeper = Keeper(place, 1000, "--numa-node", "0")
    maps = Path(f"/proc/{keeper.process.pid}/numa_maps").read_text().splitlines()
    (memory,) = [line for line in maps if "memfd:kvshm-kv" in line]
    assert memory.split()[1] == "bind:0"
    done = kvshm(place, "keeper", "--memory", "1M", "--numa-node", "4000")
    assert done.returncode == 2
    assert "--numa-node 4000: there is no such node; there are: 0" in done.stderr


def test_nobody_need_read_what_it_says(place: Node, toys: Toys) -> None:
    """What it keeps is worth more than its lines."""
    a = toys.join("a")
    command = [sys.executable, "-P", "-m", "kvshm.tools.cli", "keeper", "--memory", "1M"]
    command += ["--name", "k", "--run-dir", str(place.run_dir), "--namespace", place.namespace]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        keeper.stdout.readline()
        keeper.stdout.close()
        a.compute(prompt(a, b"1"), range(6))
        wait_until(lambda: "k" in names_of(place), "it keeps, and says so")
        b = toys.join("b", kind="another")
        wait_until(lambda: names_of(place).count("k") == 2, "once more")
        assert b.node.joined
        keeper.terminate()
        assert keeper.wait(PATIENCE_SECONDS) == 0
