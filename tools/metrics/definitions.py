"""The registry of all metrics: name, type, labels and what each of them tells.  Pure.

docs/metrics.md is written from it (docs/generate.py), so this module must not import the native
one.  Which counters and histograms a metric shows stands with the metric; what is computed from
other parts of a reading stands in samples.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


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
    """One metric."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    """What it tells, and the unit where the name does not say it."""
    shows: Mapping[str, str] = field(default_factory=dict)
    """Labels of the counters, or histograms, that it shows, each with the value of the metric's
    last label (empty if the metric has no label beside those of ENGINE)."""
    scale: float = 1.0
    """What a counter is multiplied with."""


def _counter(name: str, text: str, shows: str, scale: float = 1.0) -> Metric:
    """A metric that shows one counter."""
    return Metric(f"kvshm_{name}_total", Kind.COUNTER, ENGINE, text, {shows: ""}, scale)


def _counters(name: str, label: str, text: str, shows: Mapping[str, str]) -> Metric:
    """A metric that shows several counters, told apart by a label."""
    return Metric(f"kvshm_{name}_total", Kind.COUNTER, (*ENGINE, label), text, shows)


def _histogram(name: str, text: str, shows: Mapping[str, str], *label: str) -> Metric:
    return Metric(f"kvshm_{name}", Kind.HISTOGRAM, (*ENGINE, *label), text, shows)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"kvshm_{name}", Kind.GAUGE, labels, text)


def _traffic(name: str, text: str, *label: str) -> Metric:
    return Metric(f"kvshm_{name}_total", Kind.COUNTER, (*COPIES, *label), text)


MISSES = (
    "no_peer", "no_owner", "too_short", "lease_lost", "quarantined", "fingerprint", "cheaper",
    "no_room", "too_long", "not_importing", "not_shared", "failed", "not_read", "own",
)  # fmt: skip
PATHS = ("own", "same_gpu", "shm", "nvlink", "pcie", "staged", "other")
HOOKS = ("match", "allocated", "build", "output", "finished", "begin", "load_at_once", "collect")

VALUE = (
    _counters(
        "prompt_tokens",
        "source",
        "Prompt tokens of requests, counted when a request is first scheduled, by where their KV "
        "came from: local (the engine's own cache), peer (other engines), computed (neither, or "
        "the import failed). The sum over source is all prompt tokens.",
        {f"prompt_tokens_{source}": source for source in ("local", "peer", "computed")},
    ),
    _counter("imported_tokens", "Prompt tokens that imports have brought.", "imported_tokens"),
    _counter("lookups", "Prefixes looked up; again while a request waits.", "lookups"),
    _counter("lookup_hits", "Lookups that led to a plan for an import.", "lookup_hits"),
    _counter("matched_blocks", "Blocks in the plans of lookups.", "blocks_matched"),
    _counters(
        "miss",
        "reason",
        "Lookups and plans that led to no import, by reason; docs/operations.md explains each.",
        {f"miss_{reason}": reason for reason in MISSES},
    ),
    _counter("trial_imports", "Imports although computing was estimated to be faster.", "tried"),
    _counter(
        "bad_options",
        "Requests that were not shared because their options could not be understood.",
        "bad_options",
    ),
    _histogram(
        "match_length_tokens",
        "Length in tokens of the prefixes found in other engines.",
        {"match_length": ""},
    ),
)
COPYING = (
    _histogram(
        "import_seconds",
        "Time of imports on their slowest worker rank, by the slowest path of their copies.",
        {f"import_{path}": path for path in PATHS},
        "path",
    ),
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
        {"loads_done": "done", "loads_failed": "failed"},
    ),
    _counter(
        "loads_lost",
        "Imports whose end nobody reported in time; their requests were computed.",
        "loads_lost",
    ),
    _counter("loads_started", "Imports handed to the worker ranks.", "loads_started"),
    _counter("loads_at_once", "Imports that the step of their request awaited.", "loads_at_once"),
    _counter("loads_too_late", "Those that the step could not wait for.", "loads_too_late"),
    _counter(
        "imported_blocks", "Blocks imported, copies of own blocks included.", "imported_blocks"
    ),
    _counters(
        "discarded_after_copy",
        "reason",
        "Blocks that were copied and then thrown away: changed (reused while they were copied) or "
        "checksum (the bytes differed from what was published; looked for with KVSHM_VERIFY=1).",
        {"recheck_failed": "changed", "mismatched": "checksum"},
    ),
    _counter(
        "rejected_blocks",
        "Blocks of imports that were thrown away for any reason, failed copies included.",
        "discarded",
    ),
    _counter(
        "verified_blocks", "Blocks whose checksum was found right (KVSHM_VERIFY=1).", "verified"
    ),
    _counter("leases_taken", "Leases taken on blocks of other engines.", "leases_taken"),
    _counter("leases_lost", "Planned blocks that could no longer be leased.", "lease_lost"),
    _counter("quarantines", "Peers not used any more after repeated failures.", "quarantines"),
    _counter(
        "estimated_seconds", "Seconds that imports were estimated to take.", "estimated_us", 1e-6
    ),
    _counter("measured_seconds", "Seconds that the same imports took.", "measured_us", 1e-6),
    _counter(
        "computing_seconds",
        "Seconds that computing the blocks of these imports was estimated to take.",
        "computing_us",
        1e-6,
    ),
)
EXPORTING = (
    _counter("blocks_published", "Blocks made readable by other engines.", "published"),
    _counter("blocks_retracted", "Blocks withdrawn from other engines.", "retracted"),
    _counter("blocks_drained", "Withdrawn blocks whose leases ended within the budget.", "drained"),
    _counter("forced", "Blocks taken back over leases that were still held.", "forced"),
    _counter("blocks_kept", "Leased or held blocks passed over, others being reused.", "kept"),
    _counter("leases_swept", "Leases of dead engines that the coordinator has cleared.", "swept"),
    _histogram(
        "drain_wait_seconds",
        "Wait of a step for leases on blocks that it reuses.",
        {"drain_wait": ""},
    ),
    _histogram(
        "hook_seconds",
        "Time that kvshm takes of vLLM's scheduler and workers, by hook.",
        {f"hook_{hook}": hook for hook in HOOKS},
        "hook",
    ),
    _counter(
        "hook_errors",
        "Unexpected errors in kvshm's hooks; after one, kvshm is off for the engine.",
        "hook_errors",
    ),
    _counter(
        "weights_written",
        "Times that ranks found weights written which nobody had announced; docs/fingerprint.md.",
        "weights_written",
    ),
    _counter(
        "still_mapped",
        "Times that a rank's KV cache slept while other engines still mapped it.",
        "still_mapped",
    ),
)
EVENTS = (
    _counter("events_sent", "Messages of events handed to the coordinator.", "events_sent"),
    _counter(
        "events_lost",
        "Messages of events that could not be sent, and batches that found the queue full: other "
        "engines read the slot table instead.",
        "events_dropped",
    ),
    _counter(
        "events_unheard", "Batches of events while no other engine was there.", "events_unheard"
    ),
    _counter("index_full", "Events that the replica index had no room for.", "index_full"),
    _counter("resyncs", "Slot tables read again after a gap in the events.", "resyncs"),
    _counter(
        "rejoins",
        "Times that the engine joined again: with a new coordinator, or so that others scan.",
        "rejoins",
    ),
    _counter("bad_messages", "Messages that could not be read and were dropped.", "bad_messages"),
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
        "cannot be told).",
        *ENGINE,
        "check",
    ),
    _gauge("unreadable_engines", "Engines of which nothing can be shown.", "namespace"),
    _gauge(
        "ended_engines",
        "Engines that were killed before anybody looked, and whose socket nobody has cleared up.",
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
    "Events": EVENTS,
    "Memory": MEMORY,
    "Health": HEALTH,
}
METRICS = {metric.name: metric for group in GROUPS.values() for metric in group}
"""All metrics by name."""

LEFT_OUT = {
    "drain_wait_us": "the sum of kvshm_drain_wait_seconds",
    "blocks_copied": "kvshm_import_blocks_total, summed over peers and paths",
    "bytes_copied": "kvshm_import_bytes_total, summed over peers and paths",
}
"""Counters that no metric shows, and why."""
