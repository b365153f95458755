"""The registry of all metrics: name, type, labels and what each of them says.  Pure.

docs/metrics.md is written from it, so this module must not import the native one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvshm._shm import statistics as c
from kvshm._shm.statistics import Counter, Histogram, Unit


class Kind(StrEnum):
    """A metric's type, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


ENGINE = ("namespace", "engine", "model")
"""The labels of what belongs to one engine."""
PEER = (*ENGINE, "peer")
COPIES = (*PEER, "path")


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    """What it says, and the unit where the name does not."""
    shows: Mapping[str, str] = field(default_factory=dict)
    """Counters or histograms, each with the value of the metric's last label; empty: no label."""
    scale: float = 1.0


def _counter(name: str, shows: Counter) -> Metric:
    scale = 1e-6 if shows.unit is Unit.MICROSECONDS else 1.0
    shown = {shows.label: ""}
    return Metric(f"kvshm_{name}_total", Kind.COUNTER, ENGINE, shows.meaning, shown, scale)


def _counters(name: str, label: str, text: str, shows: Mapping[str, Counter]) -> Metric:
    shown = {counter.label: value for value, counter in shows.items()}
    return Metric(f"kvshm_{name}_total", Kind.COUNTER, (*ENGINE, label), text, shown)


def _histogram(name: str, shows: Histogram) -> Metric:
    return Metric(f"kvshm_{name}", Kind.HISTOGRAM, ENGINE, shows.meaning, {shows.label: ""})


def _histograms(name: str, label: str, text: str, shows: Mapping[str, Histogram]) -> Metric:
    shown = {histogram.label: value for value, histogram in shows.items()}
    return Metric(f"kvshm_{name}", Kind.HISTOGRAM, (*ENGINE, label), text, shown)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"kvshm_{name}", Kind.GAUGE, labels, text)


def _traffic(name: str, text: str, *label: str) -> Metric:
    return Metric(f"kvshm_{name}_total", Kind.COUNTER, (*COPIES, *label), text)


VALUE = (
    _counters(
        "prompt_tokens",
        "source",
        c.PROMPT_TOKENS_TEXT,
        {
            "local": c.PROMPT_TOKENS_LOCAL,
            "peer": c.PROMPT_TOKENS_PEER,
            "computed": c.PROMPT_TOKENS_COMPUTED,
        },
    ),
    _counter("imported_tokens", c.IMPORTED_TOKENS),
    _counter("lookups", c.LOOKUPS),
    _counter("lookup_hits", c.LOOKUP_HITS),
    _counter("matched_blocks", c.BLOCKS_MATCHED),
    _counters(
        "miss",
        "reason",
        "Lookups and plans that led to no import, by reason; docs/operations.md explains each.",
        c.MISSES,
    ),
    _counter("trial_imports", c.TRIED),
    _counter("bad_options", c.BAD_OPTIONS),
    _histogram("match_length_tokens", c.MATCH_LENGTH),
)
COPYING = (
    _histograms("import_seconds", "path", c.IMPORT_TIMES_TEXT, c.IMPORT_TIMES),
    _traffic(
        "imports",
        "Imports from a peer on a path, by status: ok, or failed (at least one block of the peer "
        "had to be computed). An import from several peers counts for each.",
        "status",
    ),
    _traffic("import_bytes", "Bytes copied from a peer on a path, all worker ranks together."),
    _traffic("import_blocks", "Blocks copied from a peer on a path, all worker ranks together."),
    _traffic("import_timed_bytes", "Those of kvshm_import_bytes_total whose time is known."),
    _traffic(
        "import_timed_seconds",
        "Seconds that these bytes took; bytes divided by seconds is the rate of the copies.",
    ),
    _counters(
        "loads",
        "status",
        "Imports that have ended: done (every block counts) or failed (at least one block had to "
        "be computed).",
        {"done": c.LOADS_DONE, "failed": c.LOADS_FAILED},
    ),
    _counter("loads_lost", c.LOADS_LOST),
    _counter("loads_started", c.LOADS_STARTED),
    _counter("loads_at_once", c.LOADS_AT_ONCE),
    _counter("loads_too_late", c.LOADS_TOO_LATE),
    _counter("imported_blocks", c.IMPORTED_BLOCKS),
    _counters(
        "discarded_after_copy",
        "reason",
        "Blocks that were copied and then thrown away: changed (reused while they were copied) or "
        "checksum (the bytes differed from what was published; looked for with KVSHM_VERIFY=1).",
        {"changed": c.RECHECK_FAILED, "checksum": c.MISMATCHED},
    ),
    _counter("rejected_blocks", c.DISCARDED),
    _counter("verified_blocks", c.VERIFIED),
    _counter("leases_taken", c.LEASES_TAKEN),
    _counter("leases_lost", c.LEASE_LOST),
    _counter("quarantines", c.QUARANTINES),
    _counter("estimated_seconds", c.ESTIMATED_US),
    _counter("measured_seconds", c.MEASURED_US),
    _counter("computing_seconds", c.COMPUTING_US),
)
EXPORTING = (
    _counter("blocks_published", c.PUBLISHED),
    _counter("blocks_retracted", c.RETRACTED),
    _counter("blocks_drained", c.DRAINED),
    _counter("forced", c.FORCED),
    _counter("blocks_kept", c.KEPT),
    _counter("duplicates_reused", c.DUPLICATES_REUSED),
    _counter("last_copies_reused", c.LAST_COPIES_REUSED),
    _counter("duplicates_lost", c.DUPLICATES_LOST),
    _counter("blocks_evicted", c.EVICTED),
    _counter("evicted_age_seconds", c.EVICTED_US),
    _counter("leases_swept", c.SWEPT),
    _histogram("drain_wait_seconds", c.DRAIN_WAIT),
    _histograms(
        "hook_seconds",
        "hook",
        "Time that kvshm takes of the engine's scheduler and workers, by hook.",
        c.HOOKS,
    ),
    _counter("hook_errors", c.HOOK_ERRORS),
    _counter("weights_written", c.WEIGHTS_WRITTEN),
    _counter("still_mapped", c.STILL_MAPPED),
)
STORE = (
    _counter("store_asked", c.STORE_ASKED),
    _counter("store_came", c.STORE_CAME),
    _counter("store_wait_seconds", c.STORE_WAITED_US),
    _counter("store_fetched_blocks", c.STORE_FETCHED),
    _counter("store_written_blocks", c.STORE_WRITTEN),
    _counter("store_damaged_blocks", c.STORE_DAMAGED),
    _counter("store_failed", c.STORE_FAILED),
)
EVENTS = (
    _counter("events_sent", c.EVENTS_SENT),
    _counter("events_lost", c.EVENTS_DROPPED),
    _counter("events_unheard", c.EVENTS_UNHEARD),
    _counter("index_full", c.INDEX_FULL),
    _counter("resyncs", c.RESYNCS),
    _counter("rejoins", c.REJOINS),
    _counter("bad_messages", c.BAD_MESSAGES),
)
MEMORY = (
    _gauge("blocks", "Blocks of the KV cache by state: empty, ready, draining.", *ENGINE, "state"),
    _gauge("published_blocks", "Blocks that other engines can read now.", *ENGINE),
    _gauge("last_copy_blocks", "Those that no other engine of the namespace has.", *ENGINE),
    _gauge(
        "distinct_blocks",
        "Different published blocks of all engines; kvshm_published_blocks summed over engines, "
        "divided by this, is how often a block is stored.",
        "namespace",
    ),
    _gauge("keeper", "1 for a keeper: an engine that computes nothing; else 0.", *ENGINE),
    _gauge(
        "in_drain",
        "1 for an engine that is about to be stopped and imports nothing (kvshm drain); else 0.",
        *ENGINE,
    ),
    _gauge("leases", "Blocks of the engine that other engines are reading now.", *ENGINE),
    _gauge(
        "oldest_lease_seconds",
        "Age of the oldest import under way, which holds leases in other engines; 0: none is.",
        "namespace",
        "holder",
    ),
)
HEALTH = (
    _gauge(
        "engine_state",
        "1 for the engine's state, 0 for the others: healthy, degraded (it serves, but does not "
        "share as it should), down (its process has ended or does not go on), left (it has ended "
        "in good order; shown for a minute).",
        *ENGINE,
        "state",
    ),
    _gauge(
        "engine_check",
        "Whether an engine passes a check, 1 or 0: live (it runs and answers), ready (others can "
        "read its blocks), progress (no loop stands still while work waits; absent where that "
        "is not known).",
        *ENGINE,
        "check",
    ),
    _gauge("unreadable_engines", "Engines of which nothing can be shown.", "namespace"),
    _gauge(
        "ended_engines",
        "Engines that were killed before they could be read, and whose sockets are left.",
        "namespace",
    ),
    _gauge(
        "coordinator_up",
        "1 if a coordinator serves the namespace and goes on, else 0.",
        "namespace",
    ),
    _gauge(
        "last_progress_timestamp_seconds",
        "Unix time when a loop of the engine last went round.",
        *ENGINE,
        "loop",
    ),
    _gauge(
        "coordinator_last_progress_timestamp_seconds",
        "Unix time when the coordinator last went round, as engines in its roster show.",
        "namespace",
    ),
    _gauge("pending", "How much work waits for a loop of the engine.", *ENGINE, "loop"),
    _gauge(
        "peer_state",
        "1 for each other engine of the namespace: usable, suspected (silent for seconds), or "
        "refused (it serves the same model and cannot share; field is the first field of the "
        "fingerprint that differs, empty if that is not known).",
        *PEER,
        "state",
        "field",
    ),
    _gauge(
        "replica_lacking_blocks",
        "Published blocks of a peer that the engine has not heard of yet.",
        *PEER,
    ),
    _gauge(
        "replica_lag_seconds",
        "For how long the oldest of these has been published; 0: there is none.",
        *PEER,
    ),
    _gauge("epoch_start_timestamp_seconds", "Unix time when the epoch began.", *ENGINE),
    _gauge(
        "build_info",
        "1; versions of the kvshm that reads: package, memory layout, protocol.",
        "version",
        "layout",
        "protocol",
    ),
)
GROUPS = {
    "Value": VALUE,
    "Copies": COPYING,
    "Sharing with others": EXPORTING,
    "A store beyond the node": STORE,
    "Events": EVENTS,
    "Memory": MEMORY,
    "Health": HEALTH,
}
METRICS = {metric.name: metric for group in GROUPS.values() for metric in group}

LEFT_OUT = {
    "drain_wait_us": "the sum of kvshm_drain_wait_seconds",
    "blocks_copied": "kvshm_import_blocks_total, summed over peers and paths",
    "bytes_copied": "kvshm_import_bytes_total, summed over peers and paths",
}
"""Counters that no metric shows, and why."""
