"""A rank whose weights are written: what it withdraws at once, and what it tells with the next
step.  Its memory and its peers are played, everything else is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("vllm")

import torch

from kvshm._base.ids import Rank
from kvshm._base.syncpoints import SyncPoint
from kvshm._rank import rank_load
from kvshm._rank.rank_half import RankHalf
from kvshm._shm.statistics import WEIGHTS_WRITTEN
from kvshm.hooks.vllm import worker_side as worker_side_module
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.identity.layout import Placement
from kvshm.hooks.vllm.identity.rank_weights import RankWeights
from kvshm.hooks.vllm.identity.weights import watch_weights, weights_digest
from kvshm.hooks.vllm.messages import QuietStep, RankReport, StepMetadata
from kvshm.hooks.vllm.rank_loads import RankLoads
from kvshm.hooks.vllm.worker_side import WorkerSide

from ..unit.conftest import clock, exporter, namespace, served
from ..unit.exporters import Make
from ..unit.served import AnyTable
from ..unit.test_rank import cache, load_of, own, piece_of, transport
from ..waiting import until
from .conftest import Lines
from .test_witness import layer
from .test_worker_side import step

__all__ = ["cache", "clock", "exporter", "namespace", "own", "served", "transport"]

SECONDS = 0.01


class Runner:
    """What of vLLM's model runner is asked."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(layer())

    def get_model(self) -> torch.nn.Module:
        return self.model


@pytest.fixture
def rank(cache: RankHalf, monkeypatch: pytest.MonkeyPatch) -> Iterator[KvshmConnector]:
    """A worker's connector with a model; its witness looks every ten milliseconds."""
    monkeypatch.setattr(
        worker_side_module,
        "rank_fields",
        lambda c, k, models, each: {"weights": "".join(weights_digest(m, each) for m in models)},
    )
    side = object.__new__(WorkerSide)
    side._report, side._attached = None, frozenset()
    side._could_not_open, side._rank = False, Rank(0)
    side._cache, side._placement = cache, Placement(torch.empty(0), [], "1", ())
    side.loads = RankLoads(cache, side._next_report, by_block=True)
    side._vllm_config = side._kv_cache_config = None
    side._weights = RankWeights(SECONDS, side._weights_written)
    side._weights.find([Runner()], side._weights_load)
    monkeypatch.setattr(cache.transport, "export", lambda _: None, raising=False)
    made = object.__new__(KvshmConnector)
    made.strict, made._scheduler, made._worker, made._connector_metadata = True, None, side, None
    yield made
    side._weights.close()


@pytest.fixture
def sharing(rank: KvshmConnector, own: AnyTable) -> KvshmConnector:
    """The rank in an epoch."""
    step(rank, StepMetadata(1, describe=1))
    step(rank, StepMetadata(2, open_epoch=own.epoch))
    assert own.life(0) == own.epoch
    return rank


def side_of(connector: KvshmConnector) -> WorkerSide:
    assert connector._worker is not None
    return connector._worker


def write(connector: KvshmConnector) -> None:
    """Write the weights so that no one hears of it."""
    (model,) = side_of(connector)._weights.models
    model[0].weight.data.add_(1)  # type: ignore[index,operator,union-attr]  # a Sequential


def said(connector: KvshmConnector, metadata: StepMetadata) -> RankReport:
    report = step(connector, metadata)[2]
    assert isinstance(report, RankReport)
    return report


def test_a_write_is_withdrawn_at_once_though_no_step_comes(
    sharing: KvshmConnector, own: AnyTable, lines: Lines
) -> None:
    assert said(sharing, QuietStep(3)).quiet
    write(sharing)
    until(lambda: own.life(0) == 0)
    until(lambda: own.counters.read(WEIGHTS_WRITTEN) == 1)
    until(lambda: own.errors())
    assert own.errors()[0].text == "rank 0: weights written: 0.weight"
    (line,) = [line for line in lines if "written" in line]
    assert "rank 0" in line
    assert "found in 0.weight" in line


def test_the_next_step_tells_of_it_once(sharing: KvshmConnector, own: AnyTable) -> None:
    write(sharing)
    until(lambda: own.life(0) == 0)
    report = said(sharing, QuietStep(3))
    assert (report.written, report.weights_changed) == ({0: "0.weight"}, True)
    assert side_of(sharing)._cache.table is None  # type: ignore[union-attr]
    assert said(sharing, QuietStep(4)).quiet


def test_a_description_after_it_begins_anew(sharing: KvshmConnector, own: AnyTable) -> None:
    write(sharing)
    until(lambda: own.life(0) == 0)
    report = said(sharing, StepMetadata(3, describe=2))
    assert (report.written, report.weights_changed) == ({0: "0.weight"}, False)
    said(sharing, StepMetadata(4, open_epoch=own.epoch))
    assert own.life(0) == own.epoch
    write(sharing)
    until(lambda: own.life(0) == 0)


def test_no_epoch_is_opened_for_weights_that_were_written_since_the_digest(
    rank: KvshmConnector, own: AnyTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = side_of(rank)
    side._weights._witness._seconds = 3600.0
    step(rank, StepMetadata(1, describe=1))
    write(rank)
    report = said(rank, StepMetadata(2, open_epoch=own.epoch))
    assert (report.written, report.weights_changed) == ({0: "0.weight"}, True)
    assert own.life(0) == 0


def test_a_write_found_while_an_epoch_is_opened_ends_it(
    rank: KvshmConnector, own: AnyTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The witness's thread found nothing to withdraw yet."""
    side = side_of(rank)
    assert side._cache is not None
    open_epoch = side._cache.open_epoch

    def found_meanwhile(epoch: int) -> None:
        side._weights._found("0.weight")
        open_epoch(epoch)  # type: ignore[arg-type]

    monkeypatch.setattr(side._cache, "open_epoch", found_meanwhile)
    step(rank, StepMetadata(1, describe=1))
    assert said(rank, StepMetadata(2, open_epoch=own.epoch)).written == {0: "0.weight"}
    assert own.life(0) == 0


@pytest.mark.parametrize("way", ["announced", "found"])
def test_imports_under_way_bring_nothing(
    sharing: KvshmConnector,
    own: AnyTable,
    exporter: Make,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither those whose blocks are copied and checked, nor those that are being copied."""
    side, peer = side_of(sharing), exporter()
    assert side._cache is not None
    copied: list[str] = []
    monkeypatch.setattr(rank_load, "sync_point", lambda p: copied.append(p))
    arrived, later = (load_of(piece_of(peer, block), name=f"{block}") for block in (1, 2))
    side.begin_loads(StepMetadata(3, loads=[arrived]))
    until(lambda: side._cache is not None and len(side._cache._reports) == 1)
    assert side._cache._reports[0].bad == ()
    if way == "announced":
        side.weights_change()
    else:
        write(sharing)
        until(lambda: own.life(0) == 0)
    finished, bad, report = step(sharing, StepMetadata(4, loads=[later]))
    loads = list(report.loads)
    while len(finished) < 2:
        more, worse, reported = step(sharing, StepMetadata(5))
        finished, bad, loads = finished | more, bad | worse, [*loads, *reported.loads]
    assert bad == {*arrived.targets, *later.targets}
    assert {load.load_id: load.bad for load in loads} == {"1": (11,), "2": (12,)}
    assert SyncPoint.COPIED in copied


def test_vllms_own_writers_are_known_before_they_write(sharing: KvshmConnector) -> None:
    """Called in the rank itself, past vLLM's executor."""
    side = side_of(sharing)

    class Runner:
        def reload_weights(self) -> str:
            write(sharing)
            return "reloaded"

    runner = Runner()
    watch_weights([runner], side._weights_load)
    assert runner.reload_weights() == "reloaded"
    report = said(sharing, StepMetadata(3))
    assert (report.written, report.weights_changed) == ({}, True)


@pytest.mark.parametrize("method", ["sleep", "discard", "wake_up"])
def test_nothing_looks_at_weights_that_sleep(sharing: KvshmConnector, method: str) -> None:
    side = side_of(sharing)
    looked: list[bool] = []

    class Worker:
        """Of which vLLM unmaps the weights."""

    worker_ = Worker()
    setattr(worker_, method, lambda: looked.append(side._weights._witness._samples is not None))
    watch_weights([worker_], side._weights_load)
    getattr(worker_, method)()
    assert looked == [False]


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_weights_that_cannot_be_sampled_are_not_shared(rank: KvshmConnector, kind: str) -> None:
    side = side_of(rank)
    odd = torch.empty(9, device="meta") if kind == "meta" else torch.zeros(9).to_sparse()
    side._weights.models[0].register_buffer("odd", odd)
    assert "the weights cannot be sampled" in side.describe().refusal
    assert side._weights._witness._samples is None


def runner_of(connector: KvshmConnector) -> Runner:
    (runner,) = side_of(connector)._weights._owners
    assert isinstance(runner, Runner)
    return runner


def another() -> torch.nn.Module:
    made = layer()
    made.weight.data.add_(1)  # type: ignore[operator,union-attr]
    return made


def exchange_model(runner: Runner) -> None:
    runner.model = torch.nn.Sequential(another())


def exchange_module(runner: Runner) -> None:
    runner.model[0] = another()


def steer(runner: Runner) -> None:
    runner.model[0].register_forward_hook(lambda module, given, out: out + 1)


def replace_forward(runner: Runner) -> None:
    runner.model[0].forward = lambda x: x


class Other(torch.nn.Module):
    """Computes something else with the same weights."""


def replace_class(runner: Runner) -> None:
    runner.model[0].__class__ = Other


CHANGES = [exchange_model, exchange_module, steer, replace_forward, replace_class]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_computes_with_the_weights_is_watched_too(
    sharing: KvshmConnector, own: AnyTable, change: Callable[[Runner], None]
) -> None:
    change(runner_of(sharing))
    until(lambda: own.life(0) == 0)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_rank_describes_the_model_that_vllm_has_now(
    rank: KvshmConnector, change: Callable[[Runner], None]
) -> None:
    """A call of the ranks has exchanged it, and was announced.  What hooks compute cannot be
    compared with another engine."""
    side, runner = side_of(rank), runner_of(rank)
    before = side.describe()
    change(runner)
    described = side.describe()
    if change in (steer, replace_forward, replace_class):
        assert "cannot be compared" in described.refusal
    else:
        assert described.fields["weights"] != before.fields["weights"]
        assert described.fields["weights"] == weights_digest(runner.model)


def test_the_model_that_drafts_is_described_and_watched_too(
    rank: KvshmConnector, own: AnyTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers have a part in each block."""
    side, draft = side_of(rank), torch.nn.Sequential(layer(seed=5))
    alone = side.describe().fields
    monkeypatch.setattr(runner_of(rank), "get_draft_model", lambda: draft, raising=False)
    side._weights._code *= 2  # it was there at the start
    step(rank, StepMetadata(1, describe=1))
    assert side.describe().fields != alone
    step(rank, StepMetadata(2, open_epoch=own.epoch))
    assert own.life(0) == own.epoch
    draft[0].weight.data.add_(1)
    until(lambda: own.life(0) == 0)
    until(lambda: own.errors())
    assert own.errors()[0].text == "rank 0: weights written: draft: 0.weight"
