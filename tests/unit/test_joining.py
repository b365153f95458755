"""What ``join`` is told: who the engine is and where its blocks lie.  What cannot be meant is
refused before anything is opened; what the machine does not allow is only a line in the log."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvshm
from kvshm import Config, ConfigError, Group, Identity, MisuseError, Node, Region, TransportError
from kvshm._api import joining
from kvshm.config import Share

from ..descriptors import left_open, open_files
from .few_descriptors import descriptors
from .few_threads import no_threads

BLOCK = 64
IDENTITY = Identity(engine="toy 1", model="m", weights="w")


@pytest.fixture
def memory() -> Iterator[Any]:
    memory = kvshm.allocate(8 * BLOCK)
    yield memory
    memory.close()


def join(memory: Any, **how: Any) -> Node:
    given: dict[str, Any] = {
        "identity": IDENTITY,
        "memory": memory,
        "regions": [Region(0, BLOCK, BLOCK, 8)],
        "block_size": 4,
        "config": Config(run_dir="/nowhere"),
    } | how
    return kvshm.join(given.pop("identity"), **given)


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ({"block_size": 0}, "tokens of a block"),
        ({"groups": [kvshm.Group(0, 8, scale=2)]}, "one key for each block"),
        ({"block_size": 1.0}, "give a whole number"),
        ({"block_size": 1 << 32}, "tokens of a block"),
        ({"name": "n" * 65}, "shorten it"),
        ({"name": "a\nb"}, "not printable"),
        ({"name": "\ud800"}, "not printable"),
        ({"regions": []}, "give 1 to"),
        ({"regions": Region(0, BLOCK, BLOCK, 8)}, "give a list of them"),
        (
            {"regions": [Region(0, BLOCK, BLOCK, 8), Region(64, BLOCK, BLOCK, 4)]},
            "bytes of its own",
        ),
        ({"memory": bytearray(8 * BLOCK)}, "give what allocate"),
        ({"memory": memoryview(bytes(8 * BLOCK))}, "give what allocate"),
        ({"identity": "me"}, "give an Identity"),
        ({"config": "strict"}, "give a Config"),
        ({"device": ["cpu"]}, "give its type as text"),
        ({"groups": "full"}, "give a list of them"),
        ({"groups": [0]}, "give a Group"),
        ({"groups": [Group(0, 4, window=2.5)]}, "give a whole number"),
        ({"name": 3}, "give text"),
        ({"regions": [Region(0, BLOCK, BLOCK, 0)]}, "0 blocks; give 1"),
        ({"regions": [Region(0, BLOCK, BLOCK, 9)]}, "ends at byte"),
        ({"regions": [Region(1, BLOCK, BLOCK, 8)]}, "ends at byte"),
        ({"regions": [Region(-1, BLOCK, BLOCK, 8)]}, "impossible"),
        ({"regions": [Region(0, BLOCK - 1, BLOCK, 8)]}, "impossible"),
        ({"regions": [Region(0, BLOCK, 0, 8)]}, "impossible"),
        ({"regions": [Region(0, BLOCK, BLOCK, 8, handle=1)]}, "impossible"),
        ({"regions": [Region(0.0, BLOCK, BLOCK, 8)]}, "give a whole number"),
        ({"regions": [(0, BLOCK, BLOCK, 8)]}, "give a Region"),
        ({"memory": None}, "what allocate"),
        ({"memory": [1]}, "what allocate"),
        ({"groups": []}, "0 groups"),
        ({"groups": [Group(1, 4)]}, "number the groups from 0"),
        ({"groups": [Group(0, 5)]}, "keys of 4 tokens"),
        ({"groups": [Group(0, 8)]}, "keys of 4 tokens"),
        ({"groups": [Group(0, 0, scale=0)]}, "keys of 4 tokens"),
        ({"groups": [Group(0, -4, scale=-1)]}, "keys of 4 tokens"),
        ({"groups": [Group(0, 4, window=-1)]}, "give a window"),
        ({"groups": [Group(0, 4, ahead=-1)]}, "give a window"),
        ({"groups": [Group(0, 4, window=8, chunk=8)]}, "a chunk or a state"),
        ({"groups": [Group(0, 4, window=8, state=True)]}, "a chunk or a state"),
        ({"groups": [Group(0, 4, ahead=1, state=True)]}, "nothing ahead"),
        ({"groups": [Group(0, 4, state=1)]}, "give True or False"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(
    memory: Any, how: dict[str, Any], reported: str
) -> None:
    before = open_files()
    with pytest.raises(MisuseError, match=reported):
        join(**{"memory": memory, **how})
    assert not left_open(before)


@pytest.mark.parametrize(
    ("field", "reported"),
    [
        ({"engine": ""}, "'engine' of the identity is ''; give text"),
        ({"model": None}, "'model' of the identity is None"),
        ({"weights": b"w"}, "'weights' of the identity"),
        ({"weights": "\ud800"}, "'weights' of the identity"),
        ({"settings": {"dtype": ""}}, "'dtype' of the identity is ''"),
        ({"settings": {"dtype": 16}}, "'dtype' of the identity is 16"),
        ({"settings": {"": "x"}}, "'' of the identity"),
        ({"settings": {1: "x"}}, "1 of the identity"),
        ({"settings": ["dtype"]}, "give a mapping"),
        ({"settings": {"long": "x" * (1 << 17)}}, "give digests"),
        ({"settings": {"weights": "x"}}, r"\['weights'\] are fields of kvshm's own"),
        ({"settings": {"hardware": "x"}}, "use other names"),
        ({"settings": {"kvshm_abi": "x"}}, "use other names"),
        ({"settings": {"block_size": "x"}}, "use other names"),
        ({"settings": {"layers": "x"}}, "use other names"),
        ({"settings": {"transport": "x"}}, "use other names"),
        ({"settings": {"hash_algorithm": "x"}}, "use other names"),
    ],
)
def test_an_identity_is_text_under_names_of_its_own(
    memory: Any, field: dict[str, Any], reported: str
) -> None:
    given: dict[str, Any] = {"engine": "toy 1", "model": "m", "weights": "w"} | field
    with pytest.raises(MisuseError, match=reported):
        join(memory, identity=Identity(**given))


ONE: dict[str, Any] = {
    "block_size": 4,
    "regions": [Region(0, 8, 8, 4)],
    "groups": [Group(0, 4)],
    "transport": "posix_shm",
}
ME = {"engine": "toy 1", "model": "m", "weights": "w", "settings": {"dtype": "f16"}}


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "toy 2"},
        {"model": "n"},
        {"weights": "v"},
        {"settings": {"dtype": "f32"}},
        {"settings": {}},
        {"settings": {"dtype": "f16", "more": "x"}},
        {"block_size": 8},
        {"regions": [Region(0, 8, 4, 4)]},
        {"regions": [Region(0, 8, 8, 4), Region(32, 8, 8, 4)]},
        {"groups": [Group(0, 4), Group(1, 4)]},
        {"groups": [Group(0, 4, window=8)]},
        {"groups": [Group(0, 4, state=True)]},
        {"groups": [Group(0, 4, chunk=8)]},
        {"groups": [Group(0, 4, ahead=1)]},
        {"groups": [Group(0, 8, scale=2)]},
        {"transport": "cuda_ipc"},
    ],
    ids=str,
)
def test_every_field_decides_which_engines_share(change: dict[str, Any]) -> None:
    def fields(**changed: Any) -> dict[str, str]:
        who = Identity(**{key: changed.get(key, value) for key, value in ME.items()})
        where = {key: changed.get(key, value) for key, value in ONE.items()}
        return who._fingerprint_fields(**where)

    assert fields() != fields(**change)


@pytest.mark.parametrize(
    "alike",
    [{"regions": [Region(64, 16, 8, 9, handle=1)]}, {"groups": [Group(0, 4, scale=1)]}],
    ids=str,
)
def test_where_blocks_lie_does_not_decide(alike: dict[str, Any]) -> None:
    assert Identity(**ME)._fingerprint_fields(**(ONE | alike)) == Identity(
        **ME
    )._fingerprint_fields(**ONE)


def test_groups_of_numpy_s_numbers_share_with_others(memory: Any) -> None:
    four = np.int64(4)
    fields = []
    for one in (4, four):
        with join(memory, block_size=one, groups=[Group(one - 4, one, window=one)]) as node:
            fields.append(node._fields(IDENTITY))
    assert repr(fields[0]) == repr(fields[1])


class NoAllocator:
    """Stands for a transport that shares memory where it lies, as on a GPU."""

    name = "no_allocator"


def test_memory_of_the_wrong_kind_is_refused(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "choose_transport", lambda name, device: NoAllocator)
    with pytest.raises(MisuseError, match="on 'npu' give the tensors of the cache"):
        join(memory, device="npu")


@pytest.mark.parametrize("seconds", ["1", None, [], float("nan"), -1])
def test_a_hold_is_for_seconds(memory: Any, seconds: Any) -> None:
    with join(memory) as node, pytest.raises(MisuseError, match=r"give (0|seconds)"):
        node.hold(node.keys(range(4)), seconds)


@pytest.mark.parametrize("timeout", ["1", [], float("nan")])
def test_a_timeout_is_in_seconds(memory: Any, timeout: Any) -> None:
    with join(memory) as node:
        for wait in (node.wait_joined, lambda timeout: node.wait_for(node.keys([]), timeout)):
            with pytest.raises(MisuseError, match=r"timeout is .*; give seconds"):
                wait(timeout)


def check_alone(node: Node, reported: str, caplog: pytest.LogCaptureFixture) -> None:
    """It behaves as an engine that finds nothing, and says why."""
    assert reported in node.refusal
    (line,) = [line for line in caplog.messages if "not sharing the prefix cache" in line]
    assert node.refusal in line
    assert not node.joined
    assert not node.wait_joined()
    keys = node.keys(range(12))
    assert node.publish(keys, range(3)) == 0
    assert not node.lookup(keys)
    assert not node.wait_for(keys)
    assert (node.lookup(keys).lengths, node.lookup(keys).owners) == ((), ())
    assert node.contains(keys) == ["own"] * 3
    assert node.stats() == {"peers": 0}
    node.pause()
    node.resume()
    with pytest.raises(MisuseError, match="nothing was found"):
        node.load(node.lookup(keys), ())
    node.retract(range(3))
    assert node.contains(keys) == [""] * 3
    node.drain()
    node.reset(IDENTITY)
    node.close()
    node.close()
    with pytest.raises(MisuseError, match="closed"):
        node.lookup(keys)


@pytest.mark.parametrize(
    "regions",
    [[Region(0, BLOCK, BLOCK, 8)], [Region(7 * BLOCK, BLOCK, BLOCK, 1)]],
    ids=["all", "one block"],
)
def test_blocks_of_one_node_are_refused_to_another(
    memory: Any, run_dir: Path, regions: list[Region]
) -> None:
    config = Config(run_dir=str(run_dir))
    with join(memory, config=config, name="first"):
        for where in (memory, Elsewhere(memory)):
            with pytest.raises(MisuseError, match="node first of this process has these blocks"):
                join(where, config=config, regions=regions)
        assert len(os.listdir(run_dir)) <= 2, "sockets of another engine than the first"
    with join(memory, config=config, regions=regions) as again:
        assert again.refusal == ""


def test_blocks_of_another_size_over_the_same_bytes_are_refused(memory: Any, run_dir: Path) -> None:
    config = Config(run_dir=str(run_dir))
    with join(memory, config=config), pytest.raises(MisuseError, match="has these blocks"):
        join(memory, config=config, regions=[Region(0, 2 * BLOCK, 2 * BLOCK, 4)])


def test_of_two_threads_one_gets_the_memory_at_most(memory: Any, run_dir: Path) -> None:
    config, ready = Config(run_dir=str(run_dir)), threading.Barrier(2)

    def try_to_join() -> list[Node]:
        ready.wait()
        with suppress(MisuseError):
            return [join(memory, config=config)]
        return []

    with ThreadPoolExecutor(2) as threads:
        for _ in range(10):
            both = [threads.submit(try_to_join) for _ in range(2)]
            nodes = [node for one in both for node in one.result()]
            for node in nodes:
                node.close()
            assert len(nodes) <= 1
    with join(memory, config=config) as node:
        assert node.refusal == ""


def test_nodes_may_share_blocks_of_one_memory_side_by_side(memory: Any, run_dir: Path) -> None:
    config = Config(run_dir=str(run_dir))
    low, high = ([Region(first * BLOCK, BLOCK, BLOCK, 4)] for first in (0, 4))
    one = join(memory, config=config, regions=low)
    with one, join(memory, config=config, regions=high) as other:
        assert (one.refusal, other.refusal) == ("", "")


class Elsewhere:
    """The same memory, from another object."""

    def __init__(self, memory: Any) -> None:
        self.address, self.nbytes, self.buffer = memory.address, memory.nbytes, memory.buffer


def test_a_directory_of_others_leaves_it_alone(
    memory: Any, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir.chmod(0o755)
    check_alone(join(memory, config=Config(run_dir=str(run_dir))), "mode 0755", caplog)
    assert os.listdir(run_dir) == []


@pytest.mark.parametrize("share", [Share.NONE, Share.SALTED_ONLY])
def test_a_setting_leaves_it_alone(
    memory: Any, run_dir: Path, share: Share, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys do not tell which prompts had a salt, so `salted-only` shares nothing, either."""
    config = Config(run_dir=str(run_dir), share=share)
    check_alone(join(memory, config=config), f"KVSHM_SHARE={share}", caplog)
    assert os.listdir(run_dir) == []


@pytest.mark.parametrize("left", [0, 2, 4])
def test_a_process_without_descriptors_is_alone(
    memory: Any, run_dir: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    with descriptors(left=left):
        node = join(memory, config=Config(run_dir=str(run_dir)))
    check_alone(node, "", caplog)
    assert [name for name in os.listdir(run_dir) if name.endswith(".sock")] == []


def test_a_process_without_threads_is_alone(
    memory: Any, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with no_threads():
        node = join(memory, config=Config(run_dir=str(run_dir)))
    check_alone(node, "thread", caplog)


def test_closed_memory_cannot_be_shared(
    memory: Any, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory.close()
    check_alone(join(memory, config=Config(run_dir=str(run_dir))), "KV memory is closed", caplog)
    assert [name for name in os.listdir(run_dir) if name.endswith(".sock")] == []


def test_settings_come_from_the_environment(
    memory: Any, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVSHM_RUN_DIR", str(run_dir))
    monkeypatch.setenv("KVSHM_NAMESPCE", "mistyped")
    with join(memory, config=None) as node:
        assert node.refusal == ""
        assert [name for name in os.listdir(run_dir) if ".rank." in name] != []
    assert "KVSHM_NAMESPCE is not a setting of kvshm" in caplog.text
    assert [name for name in os.listdir(run_dir) if name.endswith(".sock")] == []
    monkeypatch.setenv("KVSHM_NAMESPACE", "Not One")
    with pytest.raises(ConfigError, match="KVSHM_NAMESPACE"):
        join(memory, config=None)


def test_memory_is_of_the_kind_that_its_transport_shares() -> None:
    with pytest.raises(ConfigError, match="'pigeon' is not an installed transport"):
        kvshm.allocate(1, config=kvshm.Config(transport="pigeon"))
    with pytest.raises(TransportError, match="works only within one process"):
        kvshm.allocate(1, config=kvshm.Config(transport="loopback"))
    for nbytes in (0, -1, 1e6):
        with pytest.raises(MisuseError, match=r"give (the bytes of all blocks|a whole number)"):
            kvshm.allocate(nbytes)  # type: ignore[arg-type]  # the mistake that is refused


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_choices_may_be_given_as_text() -> None:
    assert Config(share="none", role="consumer").decide_role().refusal == "KVSHM_SHARE=none"  # type: ignore[arg-type]  # as users write it
    with pytest.raises(ConfigError, match="is not all, salted-only or none"):
        Config(share="some")  # type: ignore[arg-type]  # the mistake that is refused
