"""Ranks of several engines that hold experts of one model: what each tells the others and when, and
what an engine does about it.  Boards, schedulers and ranks are real; their models are tiny."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch.distributed import distributed_c10d
from vllm.config import ParallelConfig
from vllm.distributed import parallel_state
from vllm.v1.engine.core import EngineCoreProc

from kvshm._node.board import RankBoard
from kvshm.errors import TransportError
from kvshm.hooks.vllm import expert_ranks
from kvshm.hooks.vllm import worker_side as worker_side_module
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.expert_ranks import AllShares, OwnShare
from kvshm.hooks.vllm.identity.experts import SHARE_BYTES, rest_of
from kvshm.hooks.vllm.identity.weights import weights_digest
from kvshm.hooks.vllm.messages import QuietStep, RankReport, StepMetadata

from ..unit.conftest import clock, exporter, namespace, served
from ..unit.served import AnyTable
from ..unit.test_rank import cache, own, transport
from ..waiting import until
from .scheduling import DrivenEngine, Make, described, description, prompt
from .test_private_facts import in_order
from .test_rank_weights import rank, said, side_of, write
from .test_worker_side import step

__all__ = ["cache", "clock", "exporter", "namespace", "own", "rank", "served", "transport"]

REST = rest_of({"weights": "w"})
ONE, OTHER = (bytes([number]) * SHARE_BYTES + REST for number in (1, 2))
OWN = {"weights": "w", "experts": ("01" * SHARE_BYTES)}


def both(*numbers: int) -> str:
    """The field of an instance whose ranks have these shares."""
    return f"{sum(numbers):02x}" * SHARE_BYTES


@pytest.fixture
def board(tmp_path: Path) -> Iterator[RankBoard]:
    with closing(RankBoard.named(tmp_path, "n", "ab", 2)) as made:
        yield made


def shown(board: RankBoard) -> list[bytes | None]:
    return board.digests(board.look())


# -- which ranks belong together


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What connects vLLM's ranks: each has a client of its own."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(
        distributed_c10d,
        "_get_default_store",
        lambda: torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False),
    )
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


def share_of_rank(run_dir: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> OwnShare:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: number)
    made = OwnShare.of_this_rank(run_dir, "n", SimpleNamespace(data_parallel_size=2))
    assert made is not None
    return made


@pytest.mark.usefixtures("store")
def test_ranks_find_each_other_without_waiting_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = share_of_rank(tmp_path, 0, monkeypatch)  # the other is not there yet
    first.show(OWN)
    second = share_of_rank(tmp_path, 1, monkeypatch)
    assert first.where == second.where
    with closing(RankBoard(Path(first.where[0]), 2)) as board:
        second.show({**OWN, "experts": "02" * SHARE_BYTES})
        assert shown(board) == [ONE, OTHER]
    first.close()
    second.close()


@pytest.mark.usefixtures("store")
def test_another_instance_has_another_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    mine = share_of_rank(tmp_path, 0, monkeypatch)
    other = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: other)
    assert share_of_rank(tmp_path, 0, monkeypatch).where != mine.where


def test_ranks_that_cannot_be_found_are_a_reason(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="the instance's other ranks cannot be found: "):
        OwnShare.of_this_rank(tmp_path, "n", SimpleNamespace(data_parallel_size=2))


def test_a_model_without_experts_has_no_other_ranks(tmp_path: Path) -> None:
    """vLLM runs its data-parallel ranks as engines that know nothing of each other."""
    assert OwnShare.of_this_rank(tmp_path, "n", SimpleNamespace(data_parallel_size=1)) is None


def test_vllm_connects_the_ranks_of_all_engines_of_a_mixture() -> None:
    in_order(
        parallel_state.init_distributed_environment,
        "parallel_config.data_parallel_size > 1",
        "rank = parallel_config.data_parallel_rank * world_size + rank",
        "world_size = parallel_config.world_size_across_dp",
        "torch.distributed.init_process_group(",
        "world_size=world_size",
    )
    independent = ParallelConfig.reconfigure_for_independent_dp_rank
    in_order(independent, "self.data_parallel_size = 1")
    in_order(EngineCoreProc.run_engine_core, "model_config.is_moe", independent.__name__)


# -- one rank


@pytest.fixture
def member(
    rank: KvshmConnector, board: RankBoard, monkeypatch: pytest.MonkeyPatch
) -> KvshmConnector:
    """A worker's connector that is rank 0 of two; its digests are real, its experts are not."""

    def fields(_: Any, __: Any, models: list[Any], each: dict[object, bytes]) -> dict[str, str]:
        digest = weights_digest(models[0], each)
        return {"weights": digest, "experts": digest}

    monkeypatch.setattr(worker_side_module, "rank_fields", fields)
    mine = RankBoard(board.path, 2)
    side_of(rank)._weights.share = OwnShare(mine, 0)
    return rank


@pytest.fixture
def sharing(member: KvshmConnector, own: AnyTable, board: RankBoard) -> KvshmConnector:
    """The rank in an epoch, and so is the other one."""
    board.show(1, ONE)
    step(member, StepMetadata(1, describe=1))
    step(member, StepMetadata(2, open_epoch=own.epoch))
    assert own.life(0) == own.epoch
    return member


def digest_of(connector: KvshmConnector) -> bytes:
    digest = weights_digest(side_of(connector)._weights.models[0])
    return bytes.fromhex(digest) + rest_of({"weights": digest})


def test_a_description_shows_the_digest_and_says_where(
    member: KvshmConnector, board: RankBoard
) -> None:
    report = said(member, StepMetadata(1, describe=1))
    assert report.descriptions[0].board == (str(board.path), 2)
    assert shown(board) == [digest_of(member), None]


def test_the_same_weights_described_again_disturb_nobody(
    sharing: KvshmConnector, board: RankBoard
) -> None:
    before = board.look()
    step(sharing, StepMetadata(3, describe=2))
    assert board.look() == before


def test_an_announced_change_hides_the_digest_before_it(
    sharing: KvshmConnector, board: RankBoard
) -> None:
    sharing.answer_scheduler("weights_change")
    assert shown(board) == [None, ONE]
    write(sharing)
    step(sharing, StepMetadata(3, describe=2))
    assert shown(board) == [digest_of(sharing), ONE]


def test_a_write_that_samples_show_hides_the_digest_though_no_step_comes(
    sharing: KvshmConnector, board: RankBoard
) -> None:
    write(sharing)
    until(lambda: shown(board) == [None, ONE])
    report = said(sharing, QuietStep(3))
    assert (report.written, report.weights_changed) == ({0: "0.weight"}, True)


@pytest.mark.parametrize("change", [None, OTHER])
def test_a_change_of_the_others_experts_withdraws_the_own_blocks_though_no_step_comes(
    sharing: KvshmConnector, own: AnyTable, board: RankBoard, change: bytes | None
) -> None:
    mine = shown(board)[0]
    board.clear(1) if change is None else board.show(1, change)
    until(lambda: own.life(0) == 0)
    until(lambda: own.errors())
    text = "rank 0: weights written: the experts of rank 1 of this instance"
    assert own.errors()[0].text == text
    report = said(sharing, QuietStep(3))
    assert report.weights_changed
    assert list(report.written) == [0]
    assert shown(board) == [mine, change]  # or the other rank would begin anew, and so on


def test_a_rank_that_comes_later_is_no_change(member: KvshmConnector, board: RankBoard) -> None:
    step(member, StepMetadata(1, describe=1))
    board.show(1, ONE)
    assert side_of(member)._weights.still_hold()


def test_a_description_after_their_change_holds(member: KvshmConnector, board: RankBoard) -> None:
    side_of(member)._weights._witness._seconds = 3600.0
    board.show(1, ONE)
    step(member, StepMetadata(1, describe=1))
    board.show(1, OTHER)
    assert not side_of(member)._weights.still_hold()
    step(member, StepMetadata(2, describe=2))
    assert side_of(member)._weights.still_hold()


def test_a_description_of_new_weights_that_nobody_announced_holds(
    member: KvshmConnector, board: RankBoard
) -> None:
    side_of(member)._weights._witness._seconds = 3600.0
    for describe in (1, 2):
        step(member, StepMetadata(describe, describe=describe))
        assert side_of(member)._weights.still_hold()
        write(member)


def test_a_change_between_description_and_epoch_opens_none(
    member: KvshmConnector, own: AnyTable, board: RankBoard
) -> None:
    side_of(member)._weights._witness._seconds = 3600.0
    board.show(1, ONE)
    step(member, StepMetadata(1, describe=1))
    board.clear(1)
    report = said(member, StepMetadata(2, open_epoch=own.epoch))
    assert report.weights_changed
    assert own.life(0) == 0


@pytest.mark.parametrize("meanwhile", ["written", "change"])
def test_what_another_thread_finds_before_the_digest_is_shown_hides_it(
    member: KvshmConnector, board: RankBoard, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = side_of(member)._weights
    plain = weights.described_by

    def described_by(describe: Any) -> Any:
        found = plain(describe)
        weights._found("0.weight") if meanwhile == "written" else weights.change()
        return found

    monkeypatch.setattr(weights, "described_by", described_by)
    step(member, StepMetadata(1, describe=1))
    assert shown(board) == [None, None]


def test_a_rank_that_cannot_describe_itself_hides_what_it_has_shown(
    sharing: KvshmConnector, board: RankBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_of(sharing)._weights, "find_again", lambda: "forward hooks")
    assert said(sharing, StepMetadata(3, describe=2)).descriptions[0].refusal
    assert shown(board) == [None, ONE]


def test_a_rank_whose_hook_fails_hides_it_because_nothing_guards_it_any_more(
    sharing: KvshmConnector, board: RankBoard
) -> None:
    side_of(sharing).give_up(None)
    assert shown(board) == [None, ONE]


def test_caches_that_are_registered_again_make_no_other_entry(member: KvshmConnector) -> None:
    """As after a sleep."""
    weights = side_of(member)._weights
    before = weights.share
    weights._share_of = lambda _: pytest.fail("it has one")
    weights.find_share(None)
    assert weights.share is before


def test_a_rank_that_ends_leaves_it(sharing: KvshmConnector, board: RankBoard) -> None:
    before = board.look()
    side_of(sharing).close()
    assert board.look() == before


# -- an engine's scheduler


def test_there_are_no_fields_before_all_ranks_show_one(board: RankBoard) -> None:
    all_shares = AllShares(board, lambda: OWN, [REST], pytest.fail)
    assert all_shares.fields() is None
    board.show(1, ONE)
    assert all_shares.fields() is None
    assert not all_shares.changed()
    board.show(0, OTHER)
    assert all_shares.fields() == {"experts": both(1, 2), "weights": "w"}
    assert not all_shares.changed()
    board.clear(0)
    board.show(0, OTHER)
    assert all_shares.changed()


def test_nor_before_vllm_has_chosen_its_first_hash(board: RankBoard) -> None:
    found: list[dict[str, str] | None] = [{"experts": "own"}, None]
    all_shares = AllShares(board, found.pop, [REST], pytest.fail)
    board.show(0, ONE)
    board.show(1, OTHER)
    assert all_shares.fields() is None
    assert all_shares.fields() == {"experts": both(1, 2)}


def test_what_no_own_rank_has_counts_because_it_may_be_experts(board: RankBoard) -> None:
    """Of layers that keep experts in another way than vLLM's own do."""
    found = []
    for rest in (REST, rest_of({"weights": "x"}), rest_of({"weights": "y"})):
        board.show(0, ONE)
        board.show(1, OTHER[:SHARE_BYTES] + rest)
        for mine in ([REST], [REST, rest]):
            found.append(AllShares(board, dict, mine, pytest.fail).fields())
    known = {"experts": both(1, 2)}
    assert [each == known for each in found] == [True, True, False, True, False, True]
    assert found[2] != found[4]


def test_which_rank_holds_what_no_own_rank_has_counts(tmp_path: Path) -> None:
    """It may be experts of a kind of layer that is not known: exchanged, they are another model."""
    rests = [rest_of({"weights": name}) for name in "wxy"]
    found = []
    for number, order in enumerate(((0, 1, 2), (0, 2, 1))):
        with closing(RankBoard.named(tmp_path, "n", f"a{number}", 3)) as board:
            for rank, which in enumerate(order):
                board.show(rank, bytes(SHARE_BYTES) + rests[which])
            found.append(AllShares(board, dict, rests[:1], pytest.fail).fields())
    assert None not in found
    assert found[0] != found[1]


def test_ranks_that_show_nothing_are_named_once(board: RankBoard) -> None:
    now, lines = [0.0], []
    all_shares = AllShares(board, dict, [REST], lines.append, lambda: now[0])
    board.show(0, ONE)
    for seconds in (0.0, expert_ranks.SECONDS - 1, expert_ranks.SECONDS, 2 * expert_ranks.SECONDS):
        assert lines == [] or seconds > expert_ranks.SECONDS
        now[0] = seconds
        assert all_shares.fields() is None
    (line,) = lines
    assert line.startswith("the experts of rank 1 of this instance are not known: ")
    board.show(1, OTHER)
    assert all_shares.fields() == {"experts": both(1, 2)}


@pytest.fixture
def grouped(engine: Make, board: RankBoard) -> DrivenEngine:
    """An engine whose rank is one of two; both show a digest."""
    board.show(0, ONE)
    fields = OWN
    e = engine(rank=dataclasses.replace(description(), fields=fields, board=(str(board.path), 2)))
    assert e.connector._scheduler.cache.table is None
    board.show(1, OTHER)
    e.wait_for_epoch()
    return e


def test_an_engine_joins_with_the_experts_of_all(grouped: DrivenEngine) -> None:
    state = grouped.connector._scheduler.cache.epoch_state
    assert state.info.fields["experts"] == both(1, 2)


def test_the_last_engine_removes_the_board(engine: Make) -> None:
    run_dir, space = Path(os.environ["KVSHM_RUN_DIR"]), os.environ["KVSHM_NAMESPACE"]
    with closing(RankBoard.named(run_dir, space, "ab", 1)) as board:
        board.show(0, ONE)
        path = board.path
        e = engine(rank=dataclasses.replace(description(), fields=OWN, board=(str(path), 1)))
        e.wait_for_epoch()
    os.utime(path, (0, 0))
    e.close()
    assert not path.exists()


def ended(e: DrivenEngine) -> bool:
    return e.connector._scheduler.cache.table is None


def test_a_change_elsewhere_ends_the_epoch_with_the_next_step(
    grouped: DrivenEngine, board: RankBoard
) -> None:
    grouped.add("a", prompt(3), max_tokens=30)
    grouped.step()
    grouped.step()
    old = grouped.table
    assert len(grouped.ready()) == 3
    board.clear(1)
    sent = grouped.schedule()
    assert ended(grouped)
    assert old.retired
    assert sent.metadata.describe
    fields = OWN
    again = dataclasses.replace(description(), fields=fields, board=(str(board.path), 2))
    report = dataclasses.replace(described(sent), descriptions={0: again})
    grouped.run(sent, report)
    assert ended(grouped)  # until the other rank shows its new experts
    board.show(1, ONE)
    grouped.wait_for_epoch()
    state = grouped.connector._scheduler.cache.epoch_state
    assert state.info.fields["experts"] == both(1, 1)


def test_what_was_computed_before_all_had_shown_their_new_experts_is_not_published(
    grouped: DrivenEngine, board: RankBoard
) -> None:
    """The other rank may have written them while this engine computed."""
    board.clear(1)
    grouped.add("a", prompt(3), max_tokens=60)
    sent = grouped.schedule()
    own = dataclasses.replace(description(), fields=OWN, board=(str(board.path), 2))
    grouped.run(sent, dataclasses.replace(described(sent), descriptions={0: own}))
    grouped.add("b", prompt(3, first=300), max_tokens=60)
    grouped.step()
    board.show(1, ONE)
    grouped.wait_for_epoch()
    grouped.add("c", prompt(3, first=600), max_tokens=60)
    for _ in range(40):  # also those that they have computed since are built upon the first ones
        grouped.step()
    assert grouped.ready() == set(grouped.blocks_of("c")[:5])


def test_what_a_step_has_computed_with_changed_experts_is_not_published(
    grouped: DrivenEngine, board: RankBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped.add("a", prompt(3), max_tokens=30)
    sent = grouped.schedule()
    published: list[object] = []
    publisher = grouped.connector._scheduler.cache.publisher
    monkeypatch.setattr(publisher, "publish", lambda *a, **k: published.append(a))
    board.show(1, ONE)  # while the step runs
    grouped.run(sent, RankReport(step=sent.metadata.step))
    assert ended(grouped)
    assert published == []


def test_a_board_that_cannot_be_mapped_is_said_and_nothing_is_shared(
    engine: Make, board: RankBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> RankBoard:
        raise TransportError("board cannot be mapped")

    monkeypatch.setattr("kvshm.hooks.vllm.epochs.RankBoard", fails)
    declined: list[str] = []
    monkeypatch.setattr(
        "kvshm._engine.scheduler_half.SchedulerHalf.decline",
        lambda _, reason: declined.append(reason),
    )
    e = engine(rank=dataclasses.replace(description(), board=(str(board.path), 2)))
    assert declined == ["board cannot be mapped"]
    e.add("a", prompt(3), max_tokens=3)
    e.step()
    assert ended(e)
