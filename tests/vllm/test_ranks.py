"""An engine begins an epoch once every rank has described itself; and what is said if none can."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvshm._node.protocol import RankInfo
from kvshm.hooks.vllm.messages import RankDescription
from kvshm.hooks.vllm.ranks import Ranks
from kvshm.interfaces import MemoryDescriptor

from .conftest import Lines
from .odd_vllm import FILE, NAME, changed_copy
from .scheduling import DrivenEngine, Make, prompt, vllm_config


@pytest.fixture
def lonely(model: Path, engine: Make) -> Iterator[DrivenEngine]:
    """An engine of two ranks of which one has described itself; ``engine`` sets the directory."""
    config = vllm_config(model)
    config.parallel_config.world_size = 2
    made = DrivenEngine(config, shares=False)
    yield made
    made.close()


def marks(engine: DrivenEngine) -> int:
    """Blocks that are kept in mind for an epoch to come."""
    return len(engine.connector._scheduler.tracker._computed)


def test_ranks_that_do_not_describe_themselves_are_named(
    lines: Lines, lonely: DrivenEngine
) -> None:
    """Such as ranks whose keys collide, or those of another launcher; by then vLLM has asked."""
    (line,) = [line for line in lines if "not sharing" in line]
    assert line.endswith("of 2 ranks, these did not describe their KV cache: 1")
    lonely.add("a", prompt(3))
    for _ in range(3):
        lonely.step()
    assert marks(lonely) == 0
    assert [line for line in lines if "not sharing" in line] == [line]


class Deep(DrivenEngine):
    """Two pipeline ranks of two tensor ranks each, of which the last describes itself first."""

    def shake_hands(self) -> None:
        described = {}
        for number, place in reversed([*enumerate(product(range(2), repeat=2))]):
            memory = MemoryDescriptor("loopback", 0, number, [])
            described[place] = RankDescription(RankInfo(os.getpid(), memory), {"weights": "w"})
        self.connector.set_xfer_handshake_metadata_pp_aware(described)


@pytest.mark.usefixtures("engine")
def test_ranks_are_numbered_by_pipeline_and_then_by_tensor_rank(model: Path) -> None:
    """As vLLM numbers them: a rank reads the memory of the other engine's rank of its number."""
    config = vllm_config(model)
    config.parallel_config.world_size = 4
    made = Deep(config)
    (joined,) = [made.connector._scheduler.cache.epoch_state.info]
    assert [rank.memory.rank for rank in joined.ranks] == [0, 1, 2, 3]
    made.close()


def test_ranks_that_do_not_describe_themselves_again_are_named(lines: Lines, engine: Make) -> None:
    running = engine()
    running.scheduler.reset_prefix_cache()
    running.add("a", prompt(3))
    sent = running.schedule()
    assert sent.metadata.describe
    assert not [line for line in lines if "not sharing" in line]
    running.run(sent)
    (line,) = [line for line in lines if "not sharing" in line]
    assert line.endswith("of 1 ranks, these did not describe their KV cache: 0")
    running.step()
    assert marks(running) == 0


def test_ranks_that_never_say_that_a_step_has_ended_are_named_and_leave_nothing_behind(
    lines: Lines, engine: Make
) -> None:
    """They have described themselves, and have no worker's side any more."""
    running = engine()
    side = running.connector._scheduler
    for i in range(150):
        running.add(f"r{i}", prompt(2, first=100 + 50 * i), max_tokens=1)
        running.answer(running.schedule(), KVConnectorOutput())
    (line,) = [line for line in lines if "not sharing" in line]
    assert line.endswith("of 1 ranks, these did not describe their KV cache: 0")
    assert not side.tracker._pending.steps
    assert len(side._times.measured) <= 64
    assert not side.tracker.expecting


def test_a_changed_vllm_is_refused_where_only_the_connector_was_asked_for(
    model: Path, engine: Make, lines: Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """--kv-transfer-config directly, without the plugin: vLLM runs on, with nothing shared."""
    monkeypatch.setattr("vllm.__file__", str(changed_copy(tmp_path)))
    alone = DrivenEngine(vllm_config(model), shares=False)
    (line,) = [line for line in lines if "sharing the" in line]
    assert f"{NAME} in vllm/{FILE} (fact " in line
    assert "KVSHM_UNTESTED=1" in line
    alone.add("a", prompt(3), max_tokens=1)
    assert alone.step().metadata.step == 0
    assert alone.scheduler.get_num_unfinished_requests() == 0
    alone.close()


def test_a_changed_vllm_is_used_where_allowed_and_that_is_said(
    engine: Make, lines: Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVSHM_UNTESTED", "1")
    monkeypatch.setattr("vllm.__file__", str(changed_copy(tmp_path)))
    assert engine().table.epoch
    (line,) = [line for line in lines if line.startswith("kvshm: sharing all the same")]
    assert NAME in line


def test_an_untested_vllm_that_does_the_same_says_so_once(
    engine: Make, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version_tuple__", (0, 0, "dev"))
    assert engine().table.epoch
    (line,) = [line for line in lines if "is not among the tested" in line]
    assert line.startswith("kvshm: vLLM 0.0.dev ")


class TwoRanks:
    """vLLM's executor in front of two ranks, of which one has reported every load."""

    def __init__(self) -> None:
        self.kv_output_aggregator = KVOutputAggregator(2)

    def collective_rpc(self, what: object, args: tuple[str, list[str]]) -> list[set[str]]:
        return [set(args[1]), set(args[1])]

    def heard(self, *finished: set[str]) -> set[str]:
        """What vLLM takes for ended by what its ranks report of a step."""
        outputs: list[ModelRunnerOutput | None] = []
        for names in finished:
            said = KVConnectorOutput(finished_recving=names or None)
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=said))
        whole = self.kv_output_aggregator.aggregate(outputs)
        assert whole is not None
        assert whole.kv_connector_output is not None
        return whole.kv_connector_output.finished_recving or set()


def test_what_one_rank_reported_of_a_lost_load_counts_for_no_other_of_its_name() -> None:
    """vLLM counts reports by the request's id, which may come again: the next load would count as
    ended while a rank still copies."""
    executor = TwoRanks()
    assert executor.heard({"a"}, set()) == set()
    assert Ranks(executor).end_loads(["a"]) == {"a"}
    assert executor.heard({"a"}, set()) == set()
    assert executor.heard(set(), {"a"}) == {"a"}
