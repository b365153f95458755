"""A keeper as its node's client of a store beyond it: what it writes, fetches, checks and drops.

With a folder for a store; real stores: tests/beyond.  What is withdrawn:
test_keeper_store_withdrawals.py.
"""

from __future__ import annotations

import time
from hashlib import sha256
from pathlib import Path

import pytest

from kvshm import Group

from .joined import TOKENS
from .keepers import imports, kvshm, prompt
from .processes import PATIENCE_SECONDS, wait_until
from .store_world import World
from .store_world import world as world

pytestmark = pytest.mark.multiprocess

GROUPS = (Group(0, TOKENS), Group(1, TOKENS, window=2 * TOKENS))


def test_a_prompt_of_another_node_is_fetched_once_and_shared_by_all_engines_here(
    world: World,
) -> None:
    world.keeper(world.one), world.keeper(world.two)
    _, keys = world.computed_on_one()
    b, c = world.engine(world.two, "b"), world.engine(world.two, "c")
    b.wait_until_served()
    assert b.length(keys) == 6
    imports(b.toy, keys)
    assert c.length(keys, found=6) == 0  # the node has it
    imports(c.toy, keys)
    assert sorted(key for call in world.calls("get") for key in call[1:]) == sorted(
        key for call in world.calls("put") for key in call[1:] if _key(key) in keys
    )
    assert len([key for call in world.calls("put") for key in call[1:] if _key(key) in keys]) == 6


def _key(stored: str) -> bytes:
    return bytes.fromhex(stored.rpartition("/")[2])


def test_two_engines_that_ask_at_once_have_it_fetched_once(world: World) -> None:
    world.keeper(world.one), world.keeper(world.two)
    _, keys = world.computed_on_one()
    b, c = world.engine(world.two, "b"), world.engine(world.two, "c")
    b.wait_until_served()
    (world / "held").touch()
    assert b.length(keys) == 6
    assert c.length(keys) == 6
    assert c.length(keys[:4]) == 4  # a shorter prompt with the same beginning
    (world / "held").unlink()
    imports(b.toy, keys)
    imports(c.toy, keys)
    assert [len(call) - 1 for call in world.calls("get")] == [6]


def test_what_every_engine_and_the_keeper_have_lost_comes_back(world: World) -> None:
    keeper = world.keeper(world.one, 6)
    a = world.engine(world.one, "a")
    a.wait_until_served()
    keys, other = prompt(a.toy, b"1"), prompt(a.toy, b"2")
    a.toy.compute(keys, range(6))
    a.toy.compute(keys, range(6, 12))  # used twice, it displaces what came before
    world.wait_for_written(keys)
    a.toy.node.retract(range(12))
    for first in (0, 6):
        a.toy.compute(other, range(first, first + 6))
    keeper.wait_for(other)
    assert keeper.has(keys) == [False] * 6
    assert a.length(keys) == 6
    imports(a.toy, keys)
    assert keeper.metric("store_fetched_blocks_total") == 6


def test_engines_of_another_kind_find_nothing_nor_do_other_salts(world: World) -> None:
    world.keeper(world.one), world.keeper(world.two)
    _, keys = world.computed_on_one()
    other = world.engine(world.two, "b", "other weights")
    other.wait_until_served()
    assert other.toy.prompt(6, b"1") == keys  # keys say nothing of weights
    assert other.length(keys) == 0
    same = world.engine(world.two, "c")
    same.wait_until_served()
    assert same.length(prompt(same.toy, b"another salt")) == 0
    assert same.length(keys) == 6


def test_bytes_that_are_not_as_they_were_written_are_thrown_away(world: World) -> None:
    world.keeper(world.one)
    keeper = world.keeper(world.two)
    _, keys = world.computed_on_one()
    stored = [key for call in world.calls("put") for key in call[1:]]
    third, fifth = (next(key for key in stored if _key(key) == keys[i]) for i in (2, 4))
    value = bytearray(world.store.path(third).read_bytes())
    value[-1] ^= 1  # a bit of the block
    world.store.path(third).write_bytes(value)
    world.store.path(fifth).write_bytes(world.store.path(stored[0]).read_bytes())  # another's
    b = world.engine(world.two, "b")
    b.wait_until_served()
    number = b.ask(keys)
    wait_until(lambda: b.answer(number).length == 0, "the engine is told that not all of it comes")
    wait_until(lambda: b.toy.node.lookup(keys).length == 2, "what lies before is shared")
    assert keeper.has(keys) == [True, True, False, True, False, True]
    assert keeper.metric("store_damaged_blocks_total") == 2


def test_what_computes_sooner_is_not_fetched(world: World) -> None:
    world.keeper(world.one), world.keeper(world.two)
    _, keys = world.computed_on_one()
    b = world.engine(world.two, "b")
    b.wait_until_served()
    assert b.length(keys[:2]) == 2  # it learns how long that takes
    imports(b.toy, keys[:2])
    assert b.length(keys, computing=0.0, found=2) == 0
    assert len(world.calls("get")) == 1


def test_what_the_keeper_has_no_room_for_is_not_fetched(world: World) -> None:
    world.keeper(world.one), world.keeper(world.two, 5)
    _, keys = world.computed_on_one()
    b = world.engine(world.two, "b")
    wait_until(lambda: b.length(keys[:5]) == 5, "the keeper fetches what it has room for")
    imports(b.toy, keys[:5])
    b.toy.node.retract(range(20, 25))
    assert b.length(keys) == 0


def test_of_windows_only_what_the_prompt_needs_is_fetched(world: World) -> None:
    world.keeper(world.one), world.keeper(world.two)
    a = world.engine(world.one, "a", groups=GROUPS).toy
    keys = prompt(a, b"1")
    a.compute(keys, range(6))
    for index in range(6):
        a.write(10 + index, keys[index])
        a.node.publish(keys[: index + 1], [10 + index], index, group=1)
    world.wait_for_written(keys)
    world.wait_for_written(keys, group=1)
    b = world.engine(world.two, "b", groups=GROUPS)
    wait_until(lambda: b.length(keys) == 6, "the keeper knows the engine")
    found = b.toy.node.wait_for(keys, PATIENCE_SECONDS)
    assert found.length == 6
    fetched = [key.split("/")[-2:] for call in world.calls("get") for key in call[1:]]
    full = [["0", key.hex()] for key in keys]
    assert sorted(fetched) == sorted([*full, *(["1", key.hex()] for key in keys[4:])])


def test_what_the_store_had_no_room_for_is_written_later(world: World) -> None:
    keeper = world.keeper(world.one)
    a = world.engine(world.one, "a").toy
    (world / "full").touch()
    keys = prompt(a, b"1")
    a.compute(keys, range(6))
    keeper.wait_for(keys)
    wait_until(lambda: bool(world.calls("put")), "the store refuses it")
    (world / "full").unlink()
    world.wait_for_written(keys)


@pytest.mark.parametrize("fault", ["down", "hung"])
def test_a_store_that_does_not_answer_is_a_miss_and_the_keeper_goes_on(
    world: World, fault: str
) -> None:
    keeper = world.keeper(world.one)
    a = world.engine(world.one, "a")
    a.wait_until_served()
    keys, lost = prompt(a.toy, b"1"), prompt(a.toy, b"2")
    a.toy.compute(lost, range(6))
    world.wait_for_written(lost)
    a.toy.node.retract(range(6))
    (world / fault).touch()
    keeper.process.wait_out(lambda line: line.startswith("the store does not answer"))
    begun = time.monotonic()
    assert a.length(prompt(a.toy, b"3")) == 0
    assert time.monotonic() - begun < PATIENCE_SECONDS / 2
    a.toy.compute(keys, range(6))
    keeper.wait_for(keys)
    assert keeper.metric("store_failed_total") > 0
    (world / fault).unlink()
    keeper.process.wait_out(lambda line: line == "the store answers again")
    wait_until(lambda: a.length(lost) == 6, "it fetches again")
    assert keeper.process.terminate() == 0


def test_a_store_that_is_not_there_yet_is_waited_for_by_nobody(world: World) -> None:
    (world / "hung").touch()
    keeper = world.keeper(world.one)
    keeper.process.wait_out(lambda line: line.startswith("the store does not answer"))
    a = world.engine(world.one, "a")
    keys = prompt(a.toy, b"1")
    a.toy.compute(keys, range(6))
    keeper.wait_for(keys)
    assert a.length(keys) == 0
    (world / "hung").unlink()
    keeper.process.wait_out(lambda line: line == "connected to the store")
    world.wait_for_written(keys)


def test_it_ends_while_the_store_hangs(world: World) -> None:
    keeper = world.keeper(world.one)
    world.engine(world.one, "a").wait_until_served()
    (world / "hung").touch()
    keeper.process.wait_out(lambda line: line.startswith("the store does not answer"))
    assert keeper.process.terminate() == 0


def test_a_killed_one_leaves_its_place_to_the_next(world: World) -> None:
    keeper = world.keeper(world.one)
    a, keys = world.served_and_written()
    a.toy.node.retract(range(6))
    (world / "held").touch()
    assert a.length(keys) == 6 or keeper.has(keys)
    keeper.process.kill()
    (world / "held").unlink()
    world.keeper(world.one)
    a.asks.give_up()
    wait_until(lambda: a.length(keys) == 6, "the next one fetches")
    imports(a.toy, keys)


def test_a_node_has_one_client_of_a_store(world: World, tmp_path: Path) -> None:
    world.keeper(world.one)
    refused = world.one.processes.python(
        "second",
        *("-m", "tests.multiprocess.folder_store", "keeper", "--memory", "1M"),
        *("--run-dir", str(world.one.run_dir), "--namespace", world.one.namespace),
        *("--store", str(world.folder)),
    )
    refused.wait_err("another keeper of namespace .* has a store")
    assert refused.wait() == 2


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (None, "No such file"),
        ("{", "give a file of Mooncake's settings"),
        ("{}", "master_server_address is missing"),
        ('{"master_server_address": "a:1", "local_buffer_size": "much"}', "local_buffer_size"),
    ],
)
def test_bad_settings_of_a_store_are_refused(
    world: World, tmp_path: Path, written: str | None, says: str
) -> None:
    settings = tmp_path / "mooncake.json"
    if written is not None:
        settings.write_text(written)
    ended = kvshm(world.one, "keeper", "--memory", "1M", "--store", str(settings))
    assert (ended.returncode, says in ended.stderr) == (2, True), ended.stderr


def test_files_beside_a_store_are_refused(world: World, tmp_path: Path) -> None:
    """Of their blocks nobody knows whether they were withdrawn on another node meanwhile."""
    both = ("--files", str(tmp_path / "files"), "--store", str(world.folder))
    ended = kvshm(world.one, "keeper", "--memory", "1M", *both)
    assert (ended.returncode, "give one of them" in ended.stderr) == (2, True), ended.stderr


def test_garbage_at_its_socket_is_dropped(world: World) -> None:
    import zmq

    world.keeper(world.one)
    a = world.engine(world.one, "a")
    a.wait_until_served()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"ipc://{world.one.run_dir}/{world.one.namespace}.store.sock")
        for frames in ([b""], [b"\xc1"], [b"a", b"b"], [sha256(b"").digest() * 100]):
            socket.send_multipart(frames)
        a.wait_until_served()
