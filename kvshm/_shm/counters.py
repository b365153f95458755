"""The counters: one registry of stable ids, and the values of one engine.

Counters lie in the header of an engine's slot table, so tools can read a running or dead engine's.
Ids are positions in shared memory: they are never reused or renumbered.
"""

from __future__ import annotations

from kvshm import _native

from .layout import COUNTERS_OFFSET, NUM_COUNTERS
from .segment import Segment

REGISTRY: dict[int, Counter] = {}
"""All counters by id."""


class Counter(int):
    """One counter; its number is its id."""

    label: str
    meaning: str
    offset: int
    """Where its value lies in a slot table."""

    def __new__(cls, number: int, label: str, meaning: str) -> Counter:
        """Register counter ``number``.  ValueError if the id is taken or out of range."""
        if number in REGISTRY or not 0 <= number < NUM_COUNTERS:
            raise ValueError(f"counter id {number} is taken or not below {NUM_COUNTERS}")
        counter = super().__new__(cls, number)
        counter.label, counter.meaning = label, meaning
        counter.offset = COUNTERS_OFFSET + 8 * number
        REGISTRY[number] = counter
        return counter

    def __repr__(self) -> str:
        return f"<Counter {int(self)} {self.label}>"


# -- exporter's side
PUBLISHED = Counter(0, "published", "Blocks made readable by other engines.")
RETRACTED = Counter(1, "retracted", "Blocks withdrawn, for whatever reason.")
DRAINED = Counter(2, "drained", "Retracted blocks whose leases ended within the budget.")
FORCED = Counter(3, "forced", "Retracted blocks taken back over leases still held.")
DRAIN_WAIT_US = Counter(4, "drain_wait_us", "Microseconds spent waiting for leases to end.")
EVENTS_SENT = Counter(5, "events_sent", "Messages of events handed to the coordinator.")
EVENTS_DROPPED = Counter(
    6,
    "events_dropped",
    "Messages of events that could not be sent, and batches that found the queue full.",
)
EVENTS_UNHEARD = Counter(7, "events_unheard", "Batches of events while no other engine was there.")
KEPT = Counter(8, "kept", "Leased or held blocks passed over, when vLLM took others instead.")

# -- where prompts came from: of each request, when it is first scheduled
PROMPT_TOKENS_LOCAL = Counter(
    9, "prompt_tokens_local", "Prompt tokens that the engine's own cache had."
)
PROMPT_TOKENS_PEER = Counter(10, "prompt_tokens_peer", "Prompt tokens that other engines had.")
PROMPT_TOKENS_COMPUTED = Counter(
    11, "prompt_tokens_computed", "Prompt tokens that neither had, or whose import failed."
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
    "Prompts of requests that may not share: options, an adapter, an image, no salt.",
)
MISS_FAILED = Counter(
    15, "miss_failed", "Prompts of requests whose earlier import failed; each is tried once."
)

# -- importer's side: looking
LOOKUPS = Counter(16, "lookups", "Prefixes looked up; again while a request waits.")
LOOKUP_HITS = Counter(17, "lookup_hits", "Lookups that led to a plan.")
BLOCKS_MATCHED = Counter(18, "blocks_matched", "Blocks in those plans.")
MISS_NO_PEER = Counter(19, "miss_no_peer", "Lookups while no other engine was there.")
MISS_NO_OWNER = Counter(
    20,
    "miss_no_owner",
    "Lookups whose first block nobody has or, with several groups, what each of them needs.",
)
MISS_TOO_SHORT = Counter(21, "miss_too_short", "Matches below KVSHM_MIN_PREFIX_TOKENS.")
MISS_LEASE_LOST = Counter(22, "miss_lease_lost", "Plans that could not be leased any more.")
MISS_QUARANTINED = Counter(23, "miss_quarantined", "Lookups that only avoided peers could serve.")
MISS_FINGERPRINT = Counter(24, "miss_fingerprint", "Lookups while no engine here was compatible.")
MISS_CHEAPER = Counter(
    25, "miss_cheaper", "Matches computed because that was estimated to be faster, or to see."
)
TRIED = Counter(26, "tried", "Matches imported although computing was estimated to be faster.")
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

# -- importer's side: loading
LEASES_TAKEN = Counter(32, "leases_taken", "Leases taken on blocks of other engines.")
LEASE_LOST = Counter(33, "lease_lost", "Planned blocks that could no longer be leased.")
LOADS_STARTED = Counter(34, "loads_started", "Loads handed to the worker ranks.")
LOADS_DONE = Counter(35, "loads_done", "Loads of which every block counts.")
LOADS_FAILED = Counter(36, "loads_failed", "Loads with at least one block to recompute.")
IMPORTED_BLOCKS = Counter(37, "imported_blocks", "Blocks imported, copies of own ones included.")
BLOCKS_COPIED = Counter(38, "blocks_copied", "Blocks copied, summed over ranks.")
BYTES_COPIED = Counter(39, "bytes_copied", "Bytes copied, summed over ranks.")
RECHECK_FAILED = Counter(40, "recheck_failed", "Blocks that had changed under the copy.")
DISCARDED = Counter(41, "discarded", "Copied blocks that were thrown away, for any reason.")
VERIFIED = Counter(42, "verified", "Blocks whose checksum was found right (KVSHM_VERIFY).")
MISMATCHED = Counter(43, "mismatched", "Blocks whose checksum was wrong (KVSHM_VERIFY).")
QUARANTINES = Counter(44, "quarantines", "Peers not used any more after repeated failures.")
ESTIMATED_US = Counter(45, "estimated_us", "Microseconds that loads were estimated to take.")
MEASURED_US = Counter(46, "measured_us", "Microseconds that the same loads took.")
COMPUTING_US = Counter(
    47, "computing_us", "Microseconds that computing their blocks was estimated to take."
)
LOADS_AT_ONCE = Counter(48, "loads_at_once", "Loads that the step they were scheduled in awaited.")
LOADS_TOO_LATE = Counter(49, "loads_too_late", "Those of them that it could not wait for.")
IMPORTED_TOKENS = Counter(50, "imported_tokens", "Prompt tokens that imports have brought.")
LOADS_LOST = Counter(
    51, "loads_lost", "Loads whose end nobody reported in time; their requests were computed."
)

# -- replica and coordinator
INDEX_FULL = Counter(56, "index_full", "Events the replica had no room for.")
RESYNCS = Counter(57, "resyncs", "Slot tables scanned again after a gap in the events.")
REJOINS = Counter(58, "rejoins", "Times this epoch joined a coordinator again.")
BAD_MESSAGES = Counter(59, "bad_messages", "Messages that were dropped as undecodable.")
SWEPT = Counter(60, "swept", "Leases of dead importers cleared from this table.")
WEIGHTS_WRITTEN = Counter(
    62, "weights_written", "Times that ranks found weights written which nobody had announced."
)
STILL_MAPPED = Counter(
    63, "still_mapped", "Times that a rank's KV cache slept while other engines still mapped it."
)
HOOK_ERRORS = Counter(61, "hook_errors", "Exceptions turned into a miss at the hooks.")


class CounterValues:
    """Reads the counters of one slot table."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def read(self, counter: int) -> int:
        """The current value.  KeyError for an unknown counter."""
        return _native.load(self._segment.buffer, REGISTRY[counter].offset)

    def snapshot(self) -> dict[str, int]:
        """All values by label, in the order of their ids; not read at one moment."""
        return {counter.label: self.read(counter) for counter in REGISTRY.values()}


class Counters(CounterValues):
    """Reads and increases the counters of one slot table."""

    def add(self, counter: int, amount: int = 1) -> None:
        """Add ``amount`` (not negative), atomically.  KeyError for an unknown counter."""
        number = REGISTRY[counter]
        if amount < 0:
            raise ValueError(f"{number.label} cannot count {amount}")
        _native.add(self._segment.buffer, number.offset, amount)

    def add_one_to_both(self, counter: Counter, other: Counter) -> None:
        """Add 1 to each of two counters."""
        buffer = self._segment.buffer
        _native.add(buffer, counter.offset, 1)
        _native.add(buffer, other.offset, 1)
