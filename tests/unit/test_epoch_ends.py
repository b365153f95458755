"""The end of an epoch whose slot table somebody has spoilt."""

from __future__ import annotations

import os

import pytest

from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.protocol import RankInfo
from kvshm._shm.layout import PREFIX_BYTES
from kvshm.config import Config

from ..waiting import until
from .played_transport import memory_of
from .served import ServedNode


@pytest.mark.parametrize("closes", [False, True], ids=["reset", "close"])
def test_it_is_served_no_more_and_another_can_begin(served: ServedNode, closes: bool) -> None:
    config = Config.from_env({"KVSHM_NAMESPACE": served.namespace})
    before = set(os.listdir(served.run_dir))
    cache = SchedulerHalf(config, EngineSpec("me", "model", 8, 16), served.run_dir)
    try:
        for _ in range(2):
            cache.open_epoch([RankInfo(os.getpid(), memory_of(0))], lambda: {"weights": "w"})
            until(lambda: cache.table is not None)
            assert cache.table is not None
            assert set(os.listdir(served.run_dir)) > before
            cache.table._segment.buffer[:PREFIX_BYTES] = bytes(PREFIX_BYTES)
            if not closes:
                cache.end_epoch()
                assert set(os.listdir(served.run_dir)) == before
    finally:
        cache.close()
    assert set(os.listdir(served.run_dir)) == before
