"""The public surface for engines whose scheduler and worker ranks are processes of their own.

==================== ==============================================================================
SchedulerHalf        in the scheduler's process: epochs, ``publisher``, ``planner`` (LoadPlanner:
                     ``lookup`` finds a Plan, ``load`` makes it a LoadOrder for the ranks,
                     ``end_load`` takes their LoadReports)
RankHalf, open_rank  in each rank's process: exports the rank's KV cache, carries out LoadOrders
Marks, Run, ...      what is known of the contents of each own block, for an engine that, as vLLM,
                     hashes blocks before it has computed them
Group, Groups, Part  KV cache groups, and the blocks a prefix needs of each
==================== ==============================================================================

The engine carries RankInfo, LoadOrder and LoadReport from one half to the other; they can be
pickled.
"""

from __future__ import annotations

from kvshm._base.ids import BlockId, Epoch, LoadId, Rank
from kvshm._engine.costs import Costs
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.groups import Group, Groups, Part
from kvshm._engine.load_plan import LoadFailure, LoadOrder, LoadReport, Plan
from kvshm._engine.load_planner import LoadPlanner, LoadResult
from kvshm._engine.marks import Marks, Run, blocks_of, touching
from kvshm._engine.prefix_search import ONE_FULL_GROUP
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.leftovers import clear
from kvshm._node.protocol import RankInfo, abi
from kvshm._rank.opening import open_rank
from kvshm._rank.rank_half import POLL_SECONDS, RankHalf
from kvshm._shm.error_log import ErrorCode
from kvshm._shm.statistics import (
    BAD_OPTIONS,
    HOOK_ERRORS,
    IMPORT_TIMES_TEXT,
    IMPORTED_BLOCKS,
    IMPORTED_TOKENS,
    KEPT,
    LOADS_AT_ONCE,
    LOADS_FAILED,
    LOADS_LOST,
    MISS_FAILED,
    MISS_NO_ROOM,
    MISS_NOT_IMPORTING,
    MISS_NOT_READ,
    MISS_NOT_SHARED,
    MISS_OWN,
    PROMPT_TOKENS_COMPUTED,
    PROMPT_TOKENS_LOCAL,
    PROMPT_TOKENS_PEER,
    PROMPT_TOKENS_TEXT,
    STILL_MAPPED,
    WEIGHTS_WRITTEN,
    Counter,
)

__all__ = [
    "BAD_OPTIONS",
    "HOOK_ERRORS",
    "IMPORTED_BLOCKS",
    "IMPORTED_TOKENS",
    "IMPORT_TIMES_TEXT",
    "KEPT",
    "LOADS_AT_ONCE",
    "LOADS_FAILED",
    "LOADS_LOST",
    "MISS_FAILED",
    "MISS_NOT_IMPORTING",
    "MISS_NOT_READ",
    "MISS_NOT_SHARED",
    "MISS_NO_ROOM",
    "MISS_OWN",
    "ONE_FULL_GROUP",
    "POLL_SECONDS",
    "PROMPT_TOKENS_COMPUTED",
    "PROMPT_TOKENS_LOCAL",
    "PROMPT_TOKENS_PEER",
    "PROMPT_TOKENS_TEXT",
    "STILL_MAPPED",
    "WEIGHTS_WRITTEN",
    "BlockId",
    "Costs",
    "Counter",
    "EngineSpec",
    "Epoch",
    "ErrorCode",
    "Group",
    "Groups",
    "LoadFailure",
    "LoadId",
    "LoadOrder",
    "LoadPlanner",
    "LoadReport",
    "LoadResult",
    "Marks",
    "Part",
    "Plan",
    "Rank",
    "RankHalf",
    "RankInfo",
    "Run",
    "SchedulerHalf",
    "abi",
    "blocks_of",
    "clear",
    "open_rank",
    "touching",
]
