"""What the scheduler makes of a load's reports when its own epoch has ended meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm.cache import SharedCache
from kvshm.config import Config
from kvshm.life import EngineSpec
from kvshm.plans import NO_TICKET, Load, LoadFailure, LoadReport, Piece, PieceFailure
from kvshm.protocol import RankInfo
from kvshm.terms import NO_LEASE_BIT, BlockId, Epoch

from .played_transport import memory_of

GOOD = [LoadReport("load", ())]
TARGETS = (BlockId(3), BlockId(4))


@pytest.fixture
def cache(namespace: str, tmp_path: Path) -> Iterator[SharedCache]:
    """A cache in its first epoch; without a coordinator, which it does not need for that."""
    config = Config.from_env({"KVSHM_NAMESPACE": namespace})
    cache = SharedCache(config, EngineSpec("me", "model", 8, 16), tmp_path)
    begin_epoch(cache)
    yield cache
    cache.close()


def begin_epoch(cache: SharedCache) -> None:
    rank = RankInfo(pid=os.getpid(), start_time=1, memory=memory_of(0))
    cache.open_epoch([rank], lambda: {"weights": "w"})
    deadline = time.monotonic() + 100
    while cache.epoch is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def load_in(cache: SharedCache) -> Load:
    """A load of two blocks, as it was begun in the present epoch."""
    assert cache.epoch is not None
    piece = Piece(Epoch(1), "gone", (memory_of(1),), bytes(96), b"\0\0", TARGETS)
    return Load("load", cache.epoch, NO_TICKET, NO_LEASE_BIT, (piece,), ())


def test_a_load_that_all_ranks_found_good_may_be_used(cache: SharedCache) -> None:
    assert cache.end_load(load_in(cache), GOOD) == set()


def test_nothing_is_used_of_a_load_whose_own_epoch_ended_after_its_ranks_looked(
    cache: SharedCache,
) -> None:
    """Else the blocks, computed with the old weights, would be shown in the next epoch."""
    load = load_in(cache)
    cache.end_epoch()
    assert cache.end_load(load, GOOD) == set(TARGETS)
    begin_epoch(cache)
    assert cache.end_load(load, GOOD) == set(TARGETS)


@pytest.mark.parametrize("reason", LoadFailure)
def test_a_peer_is_judged_by_what_is_its_fault_alone(
    cache: SharedCache, reason: LoadFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures in a row mean quarantine: a peer that is slow to be opened has done nothing."""
    judged: list[str] = []
    peers = cache._life.peers
    monkeypatch.setattr(peers, "fail", lambda epoch: judged.append("failed"))
    monkeypatch.setattr(peers, "fine", lambda epoch: judged.append("fine"))
    failure = PieceFailure(Epoch(1), reason, b"")
    assert cache.end_load(load_in(cache), [LoadReport("load", TARGETS, (failure,))]) == set(TARGETS)
    own_fault = {LoadFailure.UNREACHABLE, LoadFailure.COPY_FAILED, LoadFailure.MISMATCH}
    assert judged == ["failed" if reason in own_fault else "fine"]
