"""kvshm.compat: what cannot be meant is refused, by a typed error, before anything is done.  The
engine is one that shares nothing, which changes none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvshm
from kvshm import Config, ConfigError, Group, Identity, MisuseError, Node, Region
from kvshm.compat import _rows
from kvshm.compat.kv_pipe import KVPipe, PipeTimeout
from kvshm.compat.lookup_buffer import LookupBuffer
from kvshm.compat.prefill import after_prefill, before_prefill, join_cache
from kvshm.compat.retrieval import MaskError, Retrieval
from kvshm.config import Share

BLOCK = 64
CONFIG = Config(run_dir="/nowhere", share=Share.NONE)
IDENTITY = Identity(engine="toy 1", model="m", weights="w")
TOKENS = list(range(8))


@pytest.fixture
def join() -> Iterator[Callable[..., Node]]:
    memory = kvshm.allocate(8 * BLOCK, CONFIG)
    nodes = []

    def join(groups: list[Group] | None = None) -> Node:
        regions = [Region(0, BLOCK, BLOCK, 8)]
        nodes.append(
            kvshm.join(
                IDENTITY, memory=memory, regions=regions, block_size=4, groups=groups, config=CONFIG
            )
        )
        return nodes[-1]

    yield join
    for node in nodes:
        node.close()
    memory.close()


@pytest.fixture
def buffer(join: Callable[..., Node]) -> Iterator[LookupBuffer]:
    buffer = LookupBuffer(join(), IDENTITY, capacity=2, row_bytes=256, config=CONFIG)
    yield buffer
    buffer.close()


@pytest.fixture
def pipe() -> Iterator[KVPipe]:
    pipe = KVPipe("p", 0, slots=1, message_bytes=256, config=CONFIG)
    yield pipe
    pipe.close(0.0)


@pytest.mark.parametrize("groups", [[Group(0, 4), Group(1, 4)], [Group(0, 4, window=8)]])
def test_only_one_group_of_full_attention_has_slots_for_all_kv(
    join: Callable[..., Node], groups: list[Group]
) -> None:
    node, allocated = join(groups), list[int]()

    def alloc_prefix(length: int) -> list[int]:
        allocated.append(length)
        return []

    assert node.groups == tuple(groups)
    for call in (
        lambda: Retrieval(node),
        lambda: LookupBuffer(node, IDENTITY, capacity=1, row_bytes=64, config=CONFIG),
        lambda: before_prefill(node, TOKENS, alloc_prefix),
        lambda: after_prefill(node, TOKENS, [0, 1]),
    ):
        with pytest.raises(MisuseError, match="for one group of full attention"):
            call()
    assert allocated == []
    assert node.contains(node.keys(TOKENS)) == ["", ""]


def test_an_engine_that_names_no_groups_has_one(join: Callable[..., Node]) -> None:
    assert join().groups == (Group(0, 4),)


@pytest.mark.parametrize(
    "how",
    [
        {"end": 2},
        {"end": "0"},
        {"end": 0.0},
        {"end": -1},
        {"slots": 0},
        {"slots": "8"},
        {"message_bytes": 1.5},
        {"name": ""},
    ],
    ids=repr,
)
def test_a_pipe_that_cannot_be_leaves_no_memory(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(_rows, "allocate", lambda *of: made.append(kvshm.allocate(*of)) or made[0])
    with pytest.raises(MisuseError):
        KVPipe(**{"name": "p", "end": 0, "slots": 1, "message_bytes": 256, "config": CONFIG} | how)
    assert [memory for memory in made if memory._close_fd.alive] == []


@pytest.mark.parametrize(
    "tensor",
    [
        "text",
        5,
        np.arange(10)[::2],
        np.zeros(2, ">f4"),
        np.zeros(2, "c8"),
        np.zeros(2, [("a", "i4"), ("b", "f4")]),
        np.array(["u"]),
        np.zeros(2, "M8[s]"),
        np.zeros((5, 0)),
    ],
    ids=lambda tensor: str(getattr(tensor, "dtype", tensor)),
)
def test_a_tensor_that_could_not_be_received_is_not_sent(pipe: KVPipe, tensor: Any) -> None:
    with pytest.raises(MisuseError, match=r": (give|send) "):
        pipe.send_tensor(tensor, 0.0)


def test_a_pipe_that_no_one_can_reach_sends_nothing(pipe: KVPipe) -> None:
    for _ in range(2):
        with pytest.raises(PipeTimeout, match="KVSHM_SHARE=none"):
            pipe.send_tensor(b"", 60.0)
        with pytest.raises(PipeTimeout, match="KVSHM_SHARE=none"):
            pipe.recv_tensor(60.0)
    assert pipe.close()
    with pytest.raises(MisuseError, match="closed"):
        pipe.send_tensor(b"")


@pytest.mark.parametrize("timeout", ["1", float("nan"), []], ids=repr)
def test_a_timeout_is_in_seconds(
    pipe: KVPipe, buffer: LookupBuffer, join: Callable[..., Node], timeout: Any
) -> None:
    for call in (
        lambda: pipe.send_tensor(b"", timeout),
        lambda: pipe.recv_tensor(timeout),
        lambda: pipe.close(timeout),
        lambda: buffer.drop_select(TOKENS, None, range(8), timeout),
    ):
        with pytest.raises(MisuseError, match=r"timeout is .*; give seconds"):
            call()
    assert not pipe._closing


@pytest.mark.parametrize("mask", [np.zeros((8, 1), bool), ["False"] * 8, [2] * 8, [[]] * 8])
def test_what_is_neither_true_nor_false_masks_nothing(buffer: LookupBuffer, mask: Any) -> None:
    with pytest.raises(MaskError, match="of true and false"):
        buffer.drop_select(TOKENS, mask, range(8))


@pytest.mark.parametrize("mask", [np.ones(8, bool), [np.True_] * 8, [1] * 8, np.ones(8, "u1")])
def test_masks_of_numpy_and_of_numbers_will_do(buffer: LookupBuffer, mask: Any) -> None:
    assert buffer.drop_select(TOKENS, mask, range(8)).tokens is None


@pytest.mark.parametrize("capacity", [0, 1.5, "2"])
def test_a_capacity_is_a_number_of_rows(join: Callable[..., Node], capacity: Any) -> None:
    with pytest.raises(MisuseError, match="capacity"):
        LookupBuffer(join(), IDENTITY, capacity=capacity, row_bytes=64, config=CONFIG)


@pytest.mark.parametrize("hidden", ["text", 5, np.arange(8)[::2]], ids=repr)
def test_hidden_states_that_are_no_bytes_insert_nothing(buffer: LookupBuffer, hidden: Any) -> None:
    with pytest.raises(MisuseError, match="hidden"):
        buffer.insert(TOKENS, None, range(8), hidden)
    assert (len(buffer), holds(buffer)) == (0, ["", ""])


def test_a_buffer_that_is_closed_inserts_nothing(buffer: LookupBuffer) -> None:
    assert buffer.insert(TOKENS[:4], None, range(4)) == 4
    buffer.close()
    for call in (buffer.insert, buffer.drop_select):
        with pytest.raises(MisuseError, match="lookup buffer is closed"):
            call(TOKENS, None, range(8))
    assert holds(buffer) == ["own", ""]


def holds(buffer: LookupBuffer) -> list[kvshm.Held]:
    node = buffer._node
    return node.contains(node.keys(TOKENS))


@pytest.mark.parametrize(
    ("what", "how"),
    [("length", {"length": -3}), ("length", {"length": 2.0}), ("kv_blocks", {"kv_blocks": None})],
)
def test_a_prefill_that_cannot_be_publishes_nothing(
    join: Callable[..., Node], what: str, how: dict[str, Any]
) -> None:
    node = join()
    with pytest.raises(MisuseError, match=what):
        after_prefill(node, TOKENS, **{"kv_blocks": [0, 1]} | how)
    with pytest.raises(MisuseError, match="tokens"):
        after_prefill(node, None, [0, 1])
    assert node.contains(node.keys(TOKENS)) == ["", ""]


@pytest.mark.parametrize("mesh", ["../escaped", "a b", ""])
def test_a_mesh_that_cannot_be_a_namespace_makes_no_file(tmp_path: Path, mesh: str) -> None:
    config = Config(run_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"namespace.*is not 1 to 32 of"):
        join_cache(mesh, IDENTITY, memory=None, regions=[], block_size=4, config=config)
    assert list(tmp_path.iterdir()) == []
