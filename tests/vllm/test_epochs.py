"""What of one epoch of the cache reaches the next: nothing that may be of other weights.

vLLM may keep blocks over a change of weights: requests run on, and its own prefix cache stays
as it is unless somebody resets it.  What it does with them is its own affair; the other
engines must not get them, nor what is computed from them.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshm._engine.load_plan import LoadReport
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm.errors import SegmentTooSmall
from kvshm.hooks.vllm.messages import QuietStep, RankReport

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, described, prompt


def next_life(e: DrivenEngine) -> None:
    """The rank describes itself, as the next step asks it to; that step's output is in."""
    sent = e.schedule()
    e.run(sent, described(sent))
    e.wait_for_epoch()


def new_weights(e: DrivenEngine) -> None:
    """New weights, and no reset of vLLM's cache; the rank describes itself with the next step."""
    sent = e.schedule()
    e.run(sent, RankReport(step=sent.metadata.step, weights_changed=True))
    next_life(e)


def test_a_reset_ends_the_epoch_and_the_next_begins_with_new_descriptions(engine: Make) -> None:
    e = engine()
    e.add("a", prompt(3), max_tokens=1)
    e.step()
    e.step()  # the empty step after the last request
    old = e.table
    assert len(e.ready()) == 3
    assert e.scheduler.reset_prefix_cache()
    assert old.retired
    assert old.life(0) == 0
    assert e.ready() == set()
    e.add("b", prompt(2, first=300), max_tokens=3)
    sent = e.schedule()
    assert sent.metadata.describe
    e.run(sent, described(sent))
    e.wait_for_epoch()
    assert e.table.epoch != old.epoch
    sent = e.schedule()
    assert sent.metadata.open_epoch == e.table.epoch
    e.run(sent)
    assert e.ready() == set(e.blocks_of("b")[:2])  # computed before the epoch had begun


def test_a_description_from_before_the_latest_reset_opens_no_epoch(engine: Make) -> None:
    """It is of weights that may be gone by now."""
    e = engine()
    e.add("a", prompt(3), max_tokens=30)
    e.step()
    e.connector.reset_cache()
    late = e.schedule()
    e.connector.reset_cache()
    e.run(late, described(late))
    assert e.connector._scheduler.cache.table is None
    sent = e.schedule()
    assert sent.metadata.describe == late.metadata.describe + 1
    e.run(sent, described(sent))
    e.wait_for_epoch()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_without_news_tells_its_number_alone(engine: Make, asynchronous: bool) -> None:
    """The ranks are told of each epoch once; most steps tell them nothing, and what they compute
    is shown all the same."""
    e = engine(asynchronous)
    e.add("a", prompt(1), max_tokens=40)
    assert e.step().metadata.open_epoch == e.table.epoch
    for _ in range(20):
        assert vars(e.step().metadata).keys() == {"step"}
    assert e.ready() == set(e.blocks_of("a")[:2])
    e.connector.reset_cache()
    sent = e.schedule()
    assert sent.metadata.describe
    assert not isinstance(sent.metadata, QuietStep), "no epoch is there yet"
    e.run(sent, described(sent))
    e.wait_for_epoch()
    assert e.step().metadata.open_epoch == e.table.epoch
    assert isinstance(e.step().metadata, QuietStep)


def test_weights_loaded_without_a_reset_begin_another_epoch(engine: Make) -> None:
    e = engine()
    e.add("a", prompt(3), max_tokens=30)
    sent = e.schedule()
    e.run(sent, RankReport(step=sent.metadata.step, weights_changed=True))
    assert e.table.retired
    assert e.schedule().metadata.describe


def test_what_a_request_computes_on_old_blocks_is_not_readable(engine: Make) -> None:
    """The request began with other weights: each new block has attended to the old ones."""
    e = engine()
    e.add("a", prompt(3, tail=10), max_tokens=60)
    e.step()
    new_weights(e)
    for _ in range(40):
        e.step()
    assert len(e.blocks_of("a")) > 5
    assert e.ready() == set()
    e.add("b", prompt(2, first=800), max_tokens=4)
    e.step()
    assert e.ready() == set(e.blocks_of("b")[:2])


def test_what_is_computed_after_a_hit_on_old_blocks_is_not_readable(engine: Make) -> None:
    """Nor by way of a request that is not shared itself."""
    e = engine()
    e.add("a", prompt(3, tail=10), max_tokens=5)
    e.step()
    old = e.blocks_of("a")[:3]
    new_weights(e)
    tokens = [*prompt(3, tail=0), *prompt(1, tail=0, first=700)]
    e.add("b", [*tokens, 1], max_tokens=4).kv_transfer_params = {"kvshm": {"share": False}}
    e.step()
    old += e.blocks_of("b")[3:4]
    e.add("c", [*tokens, *prompt(2, first=900)], max_tokens=4)
    e.step()
    assert e.blocks_of("c")[:4] == old
    assert e.ready() == set()


def test_old_blocks_are_shared_again_once_they_have_new_contents(engine: Make) -> None:
    e = engine(num_blocks=9)
    e.add("a", prompt(5), max_tokens=3)
    e.step()
    new_weights(e)
    while e.scheduler.has_unfinished_requests():
        e.step()
    e.add("b", prompt(6, first=500), max_tokens=1)
    sent = e.schedule()
    blocks = e.blocks_of("b")
    e.run(sent)
    assert e.ready() == set(blocks[:6])


def test_a_load_that_arrived_in_an_earlier_life_is_not_readable(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy was checked and reported, then the weights changed: it is of the old ones."""
    e = engine()
    importer = e.connector._scheduler.importer
    monkeypatch.setattr(importer, "match", lambda request, local: 2 * BLOCK_SIZE)
    e.add("a", prompt(3), max_tokens=30)
    sent = e.schedule()
    (load,) = sent.metadata.loads
    monkeypatch.undo()
    object.__setattr__(load, "lost", ())  # as if all of it had been leased, and copied well
    e.run(sent, RankReport(step=0, loads=[LoadReport("a", ())], weights_changed=True))
    next_life(e)
    e.step()
    assert e.scheduler.requests["a"].num_computed_tokens > 3 * BLOCK_SIZE
    assert e.ready() == set()


def test_an_epoch_that_cannot_begin_leaves_no_marks_behind(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is left: nothing is shown before the next reset, so nothing need be known."""
    e = engine()
    side = e.connector._scheduler

    def full(*_: Any, **__: Any) -> OwnSlotTable:
        raise SegmentTooSmall("no room")

    monkeypatch.setattr(OwnSlotTable, "create", full)
    assert e.scheduler.reset_prefix_cache()
    e.add("a", prompt(3), max_tokens=60)
    sent = e.schedule()
    e.run(sent, described(sent))
    deadline = time.monotonic() + 100
    while not side.cache.failed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for _ in range(20):
        e.step()
    assert not side.tracker.expecting
    assert (len(side.tracker._pending.steps), side.tracker._computed) == (0, [])
    monkeypatch.undo()
    new_weights(e)
    e.add("b", prompt(2, first=300), max_tokens=3)
    e.step()
    assert e.ready() == set(e.blocks_of("b")[:2])


def test_an_epoch_begins_after_all_and_shows_what_is_computed_from_then_on(engine: Make) -> None:
    """A rank could not open the first one: no descriptors were left for a moment."""
    e = engine()
    side, old = e.connector._scheduler, e.table
    e.add("a", prompt(3), max_tokens=60)
    sent = e.schedule()
    assert sent.metadata.open_epoch == old.epoch
    e.run(sent, RankReport(sent.metadata.step, not_opened=old.epoch))
    assert side.cache.failed
    e.wait_for_epoch()  # perhaps before another step
    assert e.table.epoch != old.epoch
    sent = e.schedule()
    assert sent.metadata.open_epoch == e.table.epoch
    e.run(sent, RankReport(sent.metadata.step, not_opened=old.epoch))  # said of the one before
    e.add("b", prompt(2, first=300), max_tokens=3)
    e.add("c", prompt(3), max_tokens=3)  # vLLM has these blocks of "a", the epoch has not
    e.step()
    assert e.ready() == set(e.blocks_of("b")[:2])
