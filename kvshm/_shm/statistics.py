"""The statistics of an engine: one registry of its counters and histograms.

A statistic's id is its place in the slot table's header, so ids are never reused or renumbered.
The texts are also the help of the metrics.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Self, TypeVar

from .layout import (
    COUNTERS_OFFSET,
    HISTOGRAM_BYTES,
    HISTOGRAMS_OFFSET,
    NUM_COUNTERS,
    NUM_HISTOGRAMS,
)

S = TypeVar("S", bound="Statistic")


class Unit(StrEnum):
    """What a statistic counts or measures."""

    TIMES = "times"
    TOKENS = "tokens"
    BLOCKS = "blocks"
    BYTES = "bytes"
    MICROSECONDS = "us"
    NANOSECONDS = "ns"


class Statistic(int):
    """One counter or histogram; its number is its id."""

    REGISTRY: ClassVar[dict[int, Self]]
    PLACES: ClassVar[int]
    """How many of this kind a slot table has room for."""
    OFFSET: ClassVar[int]
    """Where the first one's words lie in a slot table."""
    SIZE: ClassVar[int]

    label: str
    meaning: str
    unit: Unit
    offset: int

    def __new__(cls, number: int, label: str, meaning: str, unit: Unit = Unit.TIMES) -> Self:
        """Register statistic ``number``.  ValueError if the id is taken or out of range."""
        if number in cls.REGISTRY or not 0 <= number < cls.PLACES:
            raise ValueError(f"id {number} is taken or not below {cls.PLACES}")
        new = super().__new__(cls, number)
        new.label, new.meaning, new.unit = label, meaning, unit
        new.offset = cls.OFFSET + cls.SIZE * number
        cls.REGISTRY[number] = new
        return new

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {int(self)} {self.label}>"


class Counter(Statistic):
    """A number that only grows."""

    REGISTRY: ClassVar[dict[int, Self]] = {}
    PLACES, OFFSET, SIZE = NUM_COUNTERS, COUNTERS_OFFSET, 8


class Histogram(Statistic):
    """How often values of each size came, and their sum."""

    REGISTRY: ClassVar[dict[int, Self]] = {}
    PLACES, OFFSET, SIZE = NUM_HISTOGRAMS, HISTOGRAMS_OFFSET, HISTOGRAM_BYTES


# Counters.

# -- exporter's side
PUBLISHED = Counter(0, "published", "Blocks made readable by other engines.", Unit.BLOCKS)
RETRACTED = Counter(
    1, "retracted", "Blocks withdrawn from other engines, for whatever reason.", Unit.BLOCKS
)
DRAINED = Counter(
    2, "drained", "Withdrawn blocks whose leases ended within the drain budget.", Unit.BLOCKS
)
FORCED = Counter(
    3, "forced", "Withdrawn blocks taken back over leases that were still held.", Unit.BLOCKS
)
DRAIN_WAIT_US = Counter(
    4, "drain_wait_us", "Time that steps have waited for leases to end.", Unit.MICROSECONDS
)
EVENTS_SENT = Counter(5, "events_sent", "Messages of events handed to the coordinator.")
EVENTS_DROPPED = Counter(
    6,
    "events_dropped",
    "Messages of events that could not be sent, and batches that found the queue full: "
    "other engines read the slot table instead.",
)
EVENTS_UNHEARD = Counter(7, "events_unheard", "Batches of events while no other engine was there.")
KEPT = Counter(
    8,
    "kept",
    "Leased or held blocks passed over when vLLM took blocks, others being reused.",
    Unit.BLOCKS,
)

# -- where prompts came from: of each request, when it is first scheduled
PROMPT_TOKENS_LOCAL = Counter(
    9, "prompt_tokens_local", "Prompt tokens that the engine's own cache had.", Unit.TOKENS
)
PROMPT_TOKENS_PEER = Counter(
    10, "prompt_tokens_peer", "Prompt tokens that other engines had.", Unit.TOKENS
)
PROMPT_TOKENS_COMPUTED = Counter(
    11,
    "prompt_tokens_computed",
    "Prompt tokens that neither had, or whose import failed.",
    Unit.TOKENS,
)
BAD_OPTIONS = Counter(
    12,
    "bad_options",
    "Requests that were not shared because their options could not be understood.",
)

# -- more of the importer's side: looking
MISS_NOT_IMPORTING = Counter(
    13,
    "miss_not_importing",
    "Prompts that came while the engine imported nothing: its role, a reset, a hung copy, its end.",
)
MISS_NOT_SHARED = Counter(
    14,
    "miss_not_shared",
    "Prompts of requests that may not share: options, unknown contents of inputs, no salt.",
)
MISS_FAILED = Counter(
    15, "miss_failed", "Prompts of requests whose earlier import failed; each is tried once."
)

# -- importer's side: looking
LOOKUPS = Counter(16, "lookups", "Prefixes looked up; again while a request waits.")
LOOKUP_HITS = Counter(17, "lookup_hits", "Lookups that led to a plan for an import.")
BLOCKS_MATCHED = Counter(18, "blocks_matched", "Blocks in the plans of lookups.", Unit.BLOCKS)
MISS_NO_PEER = Counter(19, "miss_no_peer", "Lookups while no other engine was there.")
MISS_NO_OWNER = Counter(
    20,
    "miss_no_owner",
    "Lookups whose first block no engine has or, with several groups, what each of them needs.",
)
MISS_TOO_SHORT = Counter(21, "miss_too_short", "Matches below KVSHM_MIN_PREFIX_TOKENS.")
MISS_LEASE_LOST = Counter(
    22,
    "miss_lease_lost",
    "Plans that came to nothing, mostly because no block could be leased any more.",
)
MISS_QUARANTINED = Counter(23, "miss_quarantined", "Lookups that only avoided peers could serve.")
MISS_FINGERPRINT = Counter(24, "miss_fingerprint", "Lookups while no engine here was compatible.")
MISS_CHEAPER = Counter(
    25,
    "miss_cheaper",
    "Matches that were computed, because that was estimated to be faster, or to measure it.",
)
TRIED = Counter(26, "tried", "Imports although computing was estimated to be faster.")
MISS_NO_ROOM = Counter(27, "miss_no_room", "Prompts that the block pool had no room to import for.")
MISS_TOO_LONG = Counter(
    28, "miss_too_long", "Matches above KVSHM_MAX_IMPORT_BLOCKS, with several groups."
)
MISS_NOT_READ = Counter(
    29,
    "miss_not_read",
    "Prompts of requests that must not read a prefix cache, as with prompt log-probabilities.",
)
MISS_OWN = Counter(30, "miss_own", "Prompts whose next block the engine's own cache has.")
MISS_IN_DRAIN = Counter(31, "miss_in_drain", "Lookups while the engine was in drain.")

# -- importer's side: loading
LEASES_TAKEN = Counter(32, "leases_taken", "Leases taken on blocks of other engines.", Unit.BLOCKS)
LEASE_LOST = Counter(
    33, "lease_lost", "Planned blocks that could no longer be leased.", Unit.BLOCKS
)
LOADS_STARTED = Counter(34, "loads_started", "Imports handed to the worker ranks.")
LOADS_DONE = Counter(35, "loads_done", "Imports of which every block counts.")
LOADS_FAILED = Counter(
    36, "loads_failed", "Imports with at least one block that had to be computed."
)
IMPORTED_BLOCKS = Counter(
    37, "imported_blocks", "Blocks imported, copies of own blocks included.", Unit.BLOCKS
)
BLOCKS_COPIED = Counter(38, "blocks_copied", "Blocks copied, summed over ranks.", Unit.BLOCKS)
BYTES_COPIED = Counter(39, "bytes_copied", "Bytes copied, summed over ranks.", Unit.BYTES)
RECHECK_FAILED = Counter(
    40,
    "recheck_failed",
    "Copied blocks that were reused while they were copied, summed over ranks.",
    Unit.BLOCKS,
)
DISCARDED = Counter(
    41,
    "discarded",
    "Blocks of imports that ranks threw away, failed copies included, summed over ranks.  Those of "
    "a load that had ended before are not counted.",
    Unit.BLOCKS,
)
VERIFIED = Counter(
    42,
    "verified",
    "Copied blocks whose checksum was found right (KVSHM_VERIFY=1), summed over ranks.",
    Unit.BLOCKS,
)
MISMATCHED = Counter(
    43,
    "mismatched",
    "Copied blocks whose checksum was wrong (KVSHM_VERIFY=1), summed over ranks.",
    Unit.BLOCKS,
)
QUARANTINES = Counter(44, "quarantines", "Peers not used any more after repeated failures.")
ESTIMATED_US = Counter(
    45, "estimated_us", "Time that imports were estimated to take.", Unit.MICROSECONDS
)
MEASURED_US = Counter(46, "measured_us", "Time that the same imports took.", Unit.MICROSECONDS)
COMPUTING_US = Counter(
    47,
    "computing_us",
    "Time that computing the blocks of these imports was estimated to take.",
    Unit.MICROSECONDS,
)
LOADS_AT_ONCE = Counter(48, "loads_at_once", "Imports that the step of their request awaited.")
LOADS_TOO_LATE = Counter(
    49,
    "loads_too_late",
    "Imports that the step of their request awaited, and could not wait for to the end.",
)
IMPORTED_TOKENS = Counter(
    50, "imported_tokens", "Prompt tokens that imports have brought.", Unit.TOKENS
)
LOADS_LOST = Counter(
    51, "loads_lost", "Imports whose end was not reported in time; their requests were computed."
)

# -- more of the exporter's side
DUPLICATES_REUSED = Counter(
    52,
    "duplicates_reused",
    "Blocks reused, before others, because another engine has the same.",
    Unit.BLOCKS,
)
LAST_COPIES_REUSED = Counter(
    53,
    "last_copies_reused",
    "Blocks reused in vLLM's order, for lack of duplicates: mostly last copies.",
    Unit.BLOCKS,
)
DUPLICATES_LOST = Counter(
    54,
    "duplicates_lost",
    "Blocks of duplicates_reused whose other copy was gone a moment later, too.",
    Unit.BLOCKS,
)

# -- a keeper's side
EVICTED = Counter(55, "evicted", "Blocks that a keeper dropped to make room.", Unit.BLOCKS)
EVICTED_US = Counter(
    64, "evicted_us", "Summed time for which evicted blocks had been kept.", Unit.MICROSECONDS
)

# -- a store beyond the node: the engine's side, then the keeper's
STORE_ASKED = Counter(
    65, "store_asked", "Requests for which a store beyond the node was asked for blocks."
)
STORE_CAME = Counter(
    66, "store_came", "Requests that had what the store had of theirs in time, from the keeper."
)
STORE_WAITED_US = Counter(
    67, "store_waited_us", "Summed time that requests have waited for a store.", Unit.MICROSECONDS
)
STORE_WRITTEN = Counter(68, "store_written", "Blocks that a keeper wrote to a store.", Unit.BLOCKS)
STORE_FETCHED = Counter(
    69, "store_fetched", "Blocks that a keeper fetched from a store.", Unit.BLOCKS
)
STORE_DAMAGED = Counter(
    70,
    "store_damaged",
    "Blocks from a store that were not as they were written, and thrown away.",
    Unit.BLOCKS,
)
STORE_FAILED = Counter(71, "store_failed", "Calls of a store that failed, or took too long.")

# -- replica and coordinator
INDEX_FULL = Counter(56, "index_full", "Events that the replica index had no room for.")
RESYNCS = Counter(57, "resyncs", "Slot tables of others read again after a gap in their events.")
REJOINS = Counter(
    58,
    "rejoins",
    "Times that the engine joined again: with a new coordinator, or because events were lost.",
)
BAD_MESSAGES = Counter(
    59, "bad_messages", "Messages of the coordinator that could not be read and were dropped."
)
SWEPT = Counter(
    60, "swept", "Leases of dead engines that the coordinator has cleared.", Unit.BLOCKS
)
WEIGHTS_WRITTEN = Counter(
    62,
    "weights_written",
    "Times that ranks found weights written without announcement; docs/fingerprint.md.",
)
STILL_MAPPED = Counter(
    63, "still_mapped", "Times that a rank's KV cache slept while other engines still mapped it."
)
HOOK_ERRORS = Counter(
    61, "hook_errors", "Unexpected errors in kvshm's hooks; after one, kvshm is off for the engine."
)

# Histograms.

# -- importer's side: loads on their slowest rank, by the slowest path of their copies
_LOADS = "Time of loads whose slowest copies were made"
IMPORT_OWN = Histogram(0, "import_own", f"{_LOADS} within the own cache.", Unit.NANOSECONDS)
IMPORT_SAME_GPU = Histogram(1, "import_same_gpu", f"{_LOADS} on one GPU.", Unit.NANOSECONDS)
IMPORT_SHM = Histogram(
    2, "import_shm", f"{_LOADS} by a CPU out of shared memory.", Unit.NANOSECONDS
)
IMPORT_NVLINK = Histogram(3, "import_nvlink", f"{_LOADS} between GPUs by NVLink.", Unit.NANOSECONDS)
IMPORT_PCIE = Histogram(4, "import_pcie", f"{_LOADS} between GPUs by PCIe.", Unit.NANOSECONDS)
IMPORT_STAGED = Histogram(5, "import_staged", f"{_LOADS} through host memory.", Unit.NANOSECONDS)
IMPORT_OTHER = Histogram(
    6, "import_other", f"{_LOADS} in a way that is not known.", Unit.NANOSECONDS
)
MATCH_LENGTH = Histogram(
    8, "match_length", "Length in tokens of the prefixes found in other engines.", Unit.TOKENS
)

# -- exporter's side
DRAIN_WAIT = Histogram(
    10, "drain_wait", "Wait of a step for leases on blocks that it reuses.", Unit.NANOSECONDS
)

# -- what kvshm takes of the engine's own time, by hook
HOOK_MATCH = Histogram(
    16, "hook_match", "Scheduler: looking for a prefix elsewhere.", Unit.NANOSECONDS
)
HOOK_ALLOCATED = Histogram(17, "hook_allocated", "Scheduler: planning a load.", Unit.NANOSECONDS)
HOOK_BUILD = Histogram(
    18, "hook_build", "Scheduler: before a step, its drain wait included.", Unit.NANOSECONDS
)
HOOK_OUTPUT = Histogram(19, "hook_output", "Scheduler: after a step.", Unit.NANOSECONDS)
HOOK_FINISHED = Histogram(
    20, "hook_finished", "Scheduler: at the end of a request.", Unit.NANOSECONDS
)
HOOK_BEGIN = Histogram(
    21, "hook_begin", "Worker: before a step with work for kvshm.", Unit.NANOSECONDS
)
HOOK_LOAD_AT_ONCE = Histogram(
    22, "hook_load_at_once", "Worker: waiting for the loads that its step needs.", Unit.NANOSECONDS
)
HOOK_COLLECT = Histogram(
    23, "hook_collect", "Worker: after a step with work for kvshm.", Unit.NANOSECONDS
)


def _named(prefix: str, registry: Mapping[int, S]) -> dict[str, S]:
    """Return the statistics whose labels begin with ``prefix``, by the rest of the label."""
    found = [each for each in registry.values() if each.label.startswith(prefix)]
    return {each.label.removeprefix(prefix): each for each in found}


MISSES = _named("miss_", Counter.REGISTRY)
"""The counters of prompts that were not imported, by the reason's name."""
HOOKS = _named("hook_", Histogram.REGISTRY)
"""The histograms of hooks, by the hook's name."""
IMPORT_TIMES = _named("import_", Histogram.REGISTRY)
"""The histograms of imports, by the path of their slowest copies; ``other``: not known."""

# What metrics say that show several statistics together.
PROMPT_TOKENS_TEXT = (
    "Prompt tokens of requests, counted when a request is first scheduled, by where their KV came "
    "from: local (the engine's own cache), peer (other engines), computed (neither, or the import "
    "failed). The sum over source is all prompt tokens."
)
IMPORT_TIMES_TEXT = (
    "Time of imports on their slowest worker rank, by the slowest path of their copies."
)
