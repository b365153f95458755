"""kvshm as one of a MultiConnector's connectors, before and behind another one of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from local_node import free_port
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from kvshm._engine.load_plan import LoadReport
from kvshm.hooks.vllm.messages import RankReport
from kvshm.hooks.vllm.ranks import Ranks, ask_rank
from kvshm.hooks.vllm.vllm_scheduler import VllmScheduler

from . import several_connectors
from .conftest import Lines
from .scheduling import (
    BLOCK_SIZE,
    DrivenEngine,
    Make,
    description,
    imagined_cache,
    own_connector,
    prompt,
    roles_of_epoch,
)
from .several_connectors import OURS, BesideEngine

OTHERS: dict[str, dict[str, Any]] = {
    "ExampleConnector": {"shared_storage_path": "/nowhere"},
    "OffloadingConnector": {"cpu_bytes_to_use": 1 << 20},
    "NixlConnector": {},
}
BOTH_ORDERS = [(name, first) for name in OTHERS for first in (True, False)]


def config_of(model: Path, other: str, ours_first: bool, **policy: Any) -> VllmConfig:
    theirs = {"kv_connector": other, "kv_connector_extra_config": OTHERS[other]}
    return several_connectors.config_of(model, theirs, ours_first, **policy)


MakeBeside = Callable[..., BesideEngine]


@pytest.fixture(autouse=True)
def nixl_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL's connector listens on a port that is the same for every engine unless told otherwise;
    tests run side by side."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))


@pytest.fixture
def beside(model: Path, engine: Make) -> Iterator[MakeBeside]:
    """Makes engines that end with the test; ``engine`` sets the run directory."""
    made: list[BesideEngine] = []

    def make(other: str, ours_first: bool, shares: bool = True, **more: Any) -> BesideEngine:
        config = config_of(model, other, ours_first)
        made.append(BesideEngine(config, shares=shares, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(("other", "ours_first"), BOTH_ORDERS)
def test_an_engine_shares_beside_another_connector(
    beside: MakeBeside, other: str, ours_first: bool
) -> None:
    e = beside(other, ours_first)
    e.add("a", prompt(3), max_tokens=2)
    e.step()
    assert e.ready() == set(e.blocks_of("a")[:3])
    e.step()
    assert e.scheduler.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("ours_first", [True, False])
def test_what_another_connector_says_of_its_ranks_is_left_to_it(
    beside: MakeBeside, ours_first: bool
) -> None:
    foreign = {(0, 0): KVConnectorHandshakeMetadata()}
    assert beside("ExampleConnector", ours_first, handshake=foreign).table.epoch


def test_an_engine_whose_ranks_cannot_be_asked_says_so(
    model: Path, engine: Make, lines: Lines
) -> None:
    alone = DrivenEngine.__new__(DrivenEngine)
    alone.shake_hands = lambda: own_connector(  # type: ignore[method-assign]  # another core
        alone.scheduler
    ).set_xfer_handshake_metadata_pp_aware({})
    DrivenEngine.__init__(alone, config_of(model, "NixlConnector", True), shares=False)
    assert any("these did not describe their KV cache: 0" in line for line in lines)
    alone.scheduler.connector.shutdown()


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_worker_beside_others_is_asked_and_gives_no_handshake(
    model: Path, engine: Make, monkeypatch: pytest.MonkeyPatch, ours_first: bool
) -> None:
    config = config_of(model, "ExampleConnector", ours_first)
    group = MultiConnector(config, KVConnectorRole.WORKER, imagined_cache(8))
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", group)
    assert group.get_handshake_metadata() is None
    answer = ask_rank(None, "describe")
    assert answer is not None
    assert answer.refusal == "the KV cache was not registered"
    group.shutdown()


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("child", [{}, {"kv_load_failure_policy": "recompute"}])
def test_a_lost_lease_is_a_miss_and_no_error(
    beside: MakeBeside, lines: Lines, monkeypatch: pytest.MonkeyPatch, child: Any, ours_first: bool
) -> None:
    """The scheduler reads the outermost configuration's policy, which is "fail" by default."""
    monkeypatch.setitem(OURS, "kv_load_failure_policy", child.get("kv_load_failure_policy", "fail"))
    e = beside("ExampleConnector", ours_first)
    assert e.config.kv_transfer_config is not None
    assert e.config.kv_transfer_config.kv_load_failure_policy == "fail"
    assert any("overridden with recompute" in line for line in lines)
    matches = iter([2 * BLOCK_SIZE])
    e.connector._scheduler.importer.match = lambda *_: next(matches, 0)  # no one has these blocks
    e.add("a", prompt(3), max_tokens=1)
    sent = e.schedule()
    (load,) = sent.metadata.metadata[e.place].loads
    lost = RankReport(step=0, loads=[LoadReport("a", load.lost)])
    said = e.scheduler.update_from_output(
        sent.output,
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            sampled_token_ids=[],
            kv_connector_output=KVConnectorOutput(
                finished_recving={"a"},
                kv_connector_worker_meta=e.reported(lost),
                invalid_block_ids=set(load.lost),
            ),
        ),
    )
    assert not [o for outputs in said.values() for o in outputs.outputs]
    request = e.scheduler.requests["a"]
    assert request.status is not RequestStatus.FINISHED_ERROR
    e.step()
    assert request.get_finished_reason() is FinishReason.LENGTH


def test_without_a_policy_nothing_is_imported(
    beside: MakeBeside, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM's scheduler cannot be told to recompute, a lost lease would fail its request."""
    monkeypatch.setattr("kvshm.hooks.vllm.vllm_scheduler.callers_with", lambda _: [])
    e = beside("ExampleConnector", ours_first=True)
    assert "kvshm: exporting only: vLLM's scheduler was not found" in lines
    e.connector._scheduler.importer.match = lambda *_: 2 * BLOCK_SIZE
    e.add("a", prompt(3), max_tokens=3)
    e.step()
    assert len(e.ready()) == 3


@pytest.mark.parametrize(
    ("kv_role", "line", "exports", "imports"),
    [
        ("kv_producer", "exporting only: kv_role=kv_producer of the engine", True, False),
        ("kv_consumer", "importing only: kv_role=kv_consumer of the engine", False, True),
    ],
)
def test_the_role_of_the_outer_connector_holds_too(
    model: Path, engine: Make, lines: Lines, kv_role: str, line: str, exports: bool, imports: bool
) -> None:
    """vLLM keeps late writers out of freed blocks only if this one is to import."""
    config = config_of(model, "NixlConnector", True)
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_role = kv_role
    config.scheduler_config.async_scheduling = True
    e = BesideEngine(config, asynchronous=True)
    assert f"kvshm: {line}" in lines
    assert roles_of_epoch(e) == (exports, imports)
    e.add("a", prompt(3), max_tokens=1)
    e.step()
    assert bool(e.ready()) == exports
    e.connector._scheduler.importer.match = lambda *_: 2 * BLOCK_SIZE
    e.add("b", prompt(3, first=700), max_tokens=1)
    assert bool(e.schedule().metadata.metadata[e.place].loads) == imports
    e.close()


def test_the_role_of_the_outer_connector_holds_without_vllms_scheduler(
    model: Path, engine: Make, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rules out exporting and the other importing, so the engine does neither."""
    monkeypatch.setattr(VllmScheduler, "of_caller", lambda _: None)
    config = config_of(model, "NixlConnector", True)
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_role = "kv_consumer"
    e = BesideEngine(config, shares=False)
    assert [line for line in lines if "only: " in line or "not sharing" in line] == [
        "kvshm: not sharing the prefix cache: kv_role=kv_consumer of the engine rules out "
        "exporting, and vLLM's scheduler was not found importing"
    ]
    assert e.connector._scheduler is None
    e.close()


def test_a_rank_that_cannot_answer_describes_nothing_and_ends_no_load() -> None:
    answers: dict[str, list[Any]] = {
        "describe": [description(), None],
        "loads.wait_for_end": [{"a"}, None],
    }

    class Executor:
        def collective_rpc(self, _: Any, args: tuple[Any, ...]) -> list[Any]:
            return answers[args[0]]

    ranks = Ranks(Executor())
    assert ranks.describe() == {0: description()}
    assert ranks.give_up({"a"}) == set()
