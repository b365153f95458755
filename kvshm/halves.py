"""The public surface for engines whose scheduler and worker ranks are processes of their own.

==================== ==============================================================================
SchedulerHalf        in the scheduler's process: epochs, ``publisher``, ``planner`` (LoadPlanner:
                     ``lookup`` finds a Plan, ``load`` makes it a LoadOrder for the ranks,
                     ``end_load`` takes their LoadReports)
RankHalf, open_rank  in each rank's process: exports the rank's KV cache, carries out LoadOrders
Marks, Run, ...      what is known of the contents of each own block, for an engine that, as vLLM,
                     hashes blocks before it has computed them
Receipt              of what an engine shows: another one waits until it has heard of it
RankBoard            on which ranks of several engines show a digest each, if each computes with
                     what the others hold
Group, Groups, Part  KV cache groups, and the blocks a prefix needs of each
==================== ==============================================================================

The engine carries RankInfo, LoadOrder and LoadReport from one half to the other; they can be
pickled.
"""

from __future__ import annotations

from kvshm._base.ids import BlockId as BlockId
from kvshm._base.ids import Epoch as Epoch
from kvshm._base.ids import LoadId as LoadId
from kvshm._base.ids import Rank as Rank
from kvshm._engine.costs import Costs as Costs
from kvshm._engine.duplicate_search import DuplicateSearch as DuplicateSearch
from kvshm._engine.duplicate_search import Found as Found
from kvshm._engine.duplicate_search import skip_unhashed as skip_unhashed
from kvshm._engine.epoch_state import EngineSpec as EngineSpec
from kvshm._engine.groups import Group as Group
from kvshm._engine.groups import Groups as Groups
from kvshm._engine.groups import Part as Part
from kvshm._engine.load_plan import LoadFailure as LoadFailure
from kvshm._engine.load_plan import LoadOrder as LoadOrder
from kvshm._engine.load_plan import LoadReport as LoadReport
from kvshm._engine.load_plan import Plan as Plan
from kvshm._engine.load_planner import LoadPlanner as LoadPlanner
from kvshm._engine.load_planner import LoadResult as LoadResult
from kvshm._engine.marks import Marks as Marks
from kvshm._engine.marks import Run as Run
from kvshm._engine.marks import blocks_of as blocks_of
from kvshm._engine.marks import touching as touching
from kvshm._engine.prefix_search import ONE_FULL_GROUP as ONE_FULL_GROUP
from kvshm._engine.scheduler_half import SchedulerHalf as SchedulerHalf
from kvshm._engine.store_asks import Lacking as Lacking
from kvshm._engine.store_asks import StoreAsks as StoreAsks
from kvshm._node.board import RankBoard as RankBoard
from kvshm._node.leftovers import clear as clear
from kvshm._node.protocol import RankInfo as RankInfo
from kvshm._node.protocol import abi as abi
from kvshm._node.receipt import Receipt as Receipt
from kvshm._rank.opening import open_rank as open_rank
from kvshm._rank.rank_half import POLL_SECONDS as POLL_SECONDS
from kvshm._rank.rank_half import RankHalf as RankHalf
from kvshm._shm.error_log import ErrorCode as ErrorCode
from kvshm._shm.statistics import BAD_OPTIONS as BAD_OPTIONS
from kvshm._shm.statistics import DUPLICATES_REUSED as DUPLICATES_REUSED
from kvshm._shm.statistics import HOOK_ERRORS as HOOK_ERRORS
from kvshm._shm.statistics import IMPORT_TIMES_TEXT as IMPORT_TIMES_TEXT
from kvshm._shm.statistics import IMPORTED_BLOCKS as IMPORTED_BLOCKS
from kvshm._shm.statistics import IMPORTED_TOKENS as IMPORTED_TOKENS
from kvshm._shm.statistics import KEPT as KEPT
from kvshm._shm.statistics import LAST_COPIES_REUSED as LAST_COPIES_REUSED
from kvshm._shm.statistics import LOADS_AT_ONCE as LOADS_AT_ONCE
from kvshm._shm.statistics import LOADS_FAILED as LOADS_FAILED
from kvshm._shm.statistics import LOADS_LOST as LOADS_LOST
from kvshm._shm.statistics import MISS_CHEAPER as MISS_CHEAPER
from kvshm._shm.statistics import MISS_FAILED as MISS_FAILED
from kvshm._shm.statistics import MISS_NO_ROOM as MISS_NO_ROOM
from kvshm._shm.statistics import MISS_NOT_IMPORTING as MISS_NOT_IMPORTING
from kvshm._shm.statistics import MISS_NOT_READ as MISS_NOT_READ
from kvshm._shm.statistics import MISS_NOT_SHARED as MISS_NOT_SHARED
from kvshm._shm.statistics import MISS_OWN as MISS_OWN
from kvshm._shm.statistics import PROMPT_TOKENS_COMPUTED as PROMPT_TOKENS_COMPUTED
from kvshm._shm.statistics import PROMPT_TOKENS_LOCAL as PROMPT_TOKENS_LOCAL
from kvshm._shm.statistics import PROMPT_TOKENS_PEER as PROMPT_TOKENS_PEER
from kvshm._shm.statistics import PROMPT_TOKENS_TEXT as PROMPT_TOKENS_TEXT
from kvshm._shm.statistics import STILL_MAPPED as STILL_MAPPED
from kvshm._shm.statistics import STORE_ASKED as STORE_ASKED
from kvshm._shm.statistics import STORE_CAME as STORE_CAME
from kvshm._shm.statistics import STORE_WAITED_US as STORE_WAITED_US
from kvshm._shm.statistics import WEIGHTS_WRITTEN as WEIGHTS_WRITTEN
from kvshm._shm.statistics import Counter as Counter
