"""``kvshm indexer`` beside engines that share: it tells of a prefix what ``Reader.holders`` knows,
to whoever has the prefix's hashes, and nobody holds it up."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from kvshm import Config, Reader
from kvshm.config import Share
from kvshm.tools.indexer.query import MAX_BODY

from . import toys as toy_engines
from .joined import TOKENS, Toy, Toys, served
from .keepers import Keeper
from .processes import Managed, Node, wait_until
from .toy_engine import BLOCK_SIZE

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


class Indexer:
    def __init__(self, place: Node) -> None:
        self.path = place.run_dir / "indexer"
        self.process = start(place, str(self.path))
        self.process.wait_err("serving unix:")

    def matches(self, keys: Sequence[bytes]) -> dict[str, dict[str, Any]]:
        """For each engine the tokens of these blocks, by where they are."""
        hashes = [key.hex() for key in keys]
        status, said = self.ask({"model": "m", "block_size": TOKENS, "seq_hashes": hashes})
        assert status == 200, said
        by_numbers = [int.from_bytes(key[-8:], "big") for key in keys]
        assert self.ask({"model": "m", "block_size": TOKENS, "block_hash": by_numbers})[1] == said
        found: dict[str, dict[str, Any]] = said["default"]
        return found

    def blocks(self, keys: Sequence[bytes]) -> dict[str, int]:
        found = self.matches(keys)
        return {name: about["longest_matched"] // TOKENS for name, about in found.items()}

    def ask(self, body: dict[str, Any]) -> tuple[int, Any]:
        return self.send("POST", "/query_by_hash", json.dumps(body).encode())

    def send(self, method: str, path: str, body: bytes = b"", **head: str) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection("localhost")) as connection:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(str(self.path))
            connection.request(method, path, body, head)
            answer = connection.getresponse()
            return answer.status, json.load(answer)


def start(place: Node, listen: str) -> Managed:
    where = ("--run-dir", str(place.run_dir), "--namespace", place.namespace)
    command = ("-P", "-m", "kvshm.tools.cli", "indexer", "--listen", listen)
    return place.processes.python("indexer", *command, *where)


@pytest.fixture
def place() -> Iterator[Node]:
    with served() as node:
        yield node


def held(place: Node, keys: Sequence[bytes], engine: str) -> int:
    """How many of these blocks, from the first on, ``Reader.holders`` finds at an engine."""
    with Reader(Config(run_dir=str(place.run_dir), namespace=place.namespace)) as reader:
        there = [engine in {block.engine for block in found} for found in reader.holders(keys)]
    return [*there, False].index(False)


def test_it_says_what_holders_says_from_a_prefixs_first_block_to_its_end(
    place: Node, toys: Toys
) -> None:
    a, b = toys.pair()
    keys = a.prompt()
    indexer = Indexer(place)
    assert indexer.blocks(keys) == {"a": 0, "b": 0}
    a.compute(keys, range(6))
    b.compute(keys[:2], range(2))
    assert indexer.blocks(keys) == {"a": 6, "b": 2}
    assert {name: held(place, keys, name) for name in "ab"} == {"a": 6, "b": 2}
    a.node.retract([3])
    assert indexer.matches(keys)["a"] == {
        "longest_matched": 3 * TOKENS,
        "GPU": 3 * TOKENS,
        "DP": {"0": 3 * TOKENS},
        "CPU": 0,
        "DISK": 0,
    }
    assert held(place, keys, "a") == 3
    b.node.close()
    wait_until(lambda: indexer.blocks(keys) == {"a": 3}, "an engine that has ended is left out")


def test_nobody_learns_of_a_salted_prompt_by_hashes_without_its_salt(
    place: Node, toys: Toys
) -> None:
    a, silent = toys.join("a"), toys.begin("s", settings={"share": Share.SALTED_ONLY})
    plain, salted, other = a.prompt(), a.prompt(salt=b"of one user"), a.prompt(salt=b"of another")
    a.compute(salted, range(6))
    assert silent.compute(plain, range(6)) == 0
    indexer = Indexer(place)
    assert indexer.blocks(salted) == {"a": 6}
    for unsalted in (plain, other):
        assert indexer.blocks(unsalted) == {"a": 0}
    status, said = indexer.ask(
        {"model": "m", "block_size": TOKENS, "seq_hashes": [], "cache_salt": "of one user"}
    )
    assert status == 400
    assert "cache_salt belongs into the hashes" in said["error"]


def test_what_a_keeper_has_counts_as_the_engines_host_memory(place: Node, toys: Toys) -> None:
    a = toys.join("a")
    keys = a.prompt()
    keeper, indexer = Keeper(place), Indexer(place)
    a.compute(keys, range(6))
    keeper.wait_for(keys)
    a.node.retract(range(6))
    found = indexer.matches(keys)
    assert {name: (on["GPU"], on["CPU"]) for name, on in found.items()} == {"a": (0, 6 * TOKENS)}
    assert found["a"]["longest_matched"] == 6 * TOKENS


def test_engines_that_hang_hold_up_no_answer_and_killed_ones_are_left_out(
    place: Node, toys: Toys
) -> None:
    a = toys.join("a")
    keys = a.prompt()
    a.compute(keys, range(6))
    hung = [toy_engines.start(place, seed) for seed in (1, 2)]
    for engine in hung:
        engine.wait_out(lambda line: line == "go")
        engine.signal(signal.SIGSTOP)
    indexer = Indexer(place)
    assert indexer.blocks(keys)["a"] == 6

    def present() -> set[str]:
        status, said = indexer.ask({"model": "toy", "block_size": BLOCK_SIZE, "seq_hashes": []})
        assert status == 200
        return set(said["default"])

    one, two = (f"toy-{engine.pid}" for engine in hung)
    assert present() == {one, two}, "the coordinator shows the tables of stopped engines"
    hung[0].kill()
    assert present() == {two}


def test_what_is_no_query_is_answered_by_its_fault(place: Node) -> None:
    indexer = Indexer(place)
    path, much = "/query_by_hash", str(MAX_BODY + 1)
    asked = {
        ("GET", "/"): 404,
        ("POST", "/query"): 404,
        ("GET", path): 405,
        ("POST", path): 400,
    }
    assert {words: indexer.send(*words)[0] for words in asked} == asked
    status, said = indexer.send("POST", path, b'{"model": 1}')
    assert (status, said) == (400, {"error": "Expected `str`, got `int` - at `$.model`"})
    for length, expected in ((much, 413), ("9" * 5000, 413), ("-1", 411), ("x", 411)):
        assert indexer.send("POST", path, **{"Content-Length": length})[0] == expected
    assert indexer.blocks([]) == {}


def test_its_socket_is_its_users_and_has_one_server_at_a_time(place: Node) -> None:
    indexer = Indexer(place)
    assert stat.S_IMODE(os.stat(indexer.path).st_mode) == 0o600
    second = start(place, str(indexer.path))
    second.wait_err("cannot listen on")
    assert second.wait() == 1
    assert indexer.blocks([]) == {}
    indexer.process.signal(signal.SIGKILL)
    indexer.process.wait()
    third = Indexer(place)
    assert third.blocks([]) == {}
    assert third.process.terminate() == 0
    assert not third.path.exists()


def test_a_path_that_is_too_long_for_a_socket_is_named(place: Node) -> None:
    path = f"{place.run_dir}/{'x' * 108}"
    refused = start(place, path)
    refused.wait_err(f"cannot listen on {path}: the path of a Unix socket has 107 bytes at most")
    assert refused.wait() == 1


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80"])
def test_other_machines_cannot_ask(place: Node, listen: str) -> None:
    refused = start(place, listen)
    refused.wait_err(
        f"'{listen.rpartition(':')[0].strip('[]')}' may be reached from other machines"
    )
    assert refused.wait() == 2


def test_a_loopback_address_can_be_asked(place: Node, toys: Toys) -> None:
    keys = toys.join("a").prompt()
    toy: Toy = toys._made[0]
    toy.compute(keys, range(6))
    url = start(place, "0").wait_err("serving http://127.0.0.1:").rpartition(" ")[2]
    host = url.removeprefix("http://").partition("/")[0]
    with closing(http.client.HTTPConnection(host)) as connection:
        body = {"model": "m", "block_size": TOKENS, "seq_hashes": [key.hex() for key in keys]}
        connection.request("POST", "/query_by_hash", json.dumps(body))
        assert json.load(connection.getresponse())["default"]["a"]["GPU"] == 6 * TOKENS
