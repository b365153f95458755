"""Trace spans of imports, below vLLM's span of the request (docs/operations.md, Traces).

    kvshm.lookup    the last lookup before the request was scheduled
    kvshm.lease     the leases of its plan
    kvshm.copy      from the begin of the first rank's copy to the end of the last one's
    kvshm.recheck   the checks after it

Spans are made when their time is over, of what is known then, and handed to OpenTelemetry's own
thread, so no step waits for a collector.  Unless vLLM traces (--otlp-traces-endpoint), the engine
has the plain RequestImporter, and OpenTelemetry is not imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvshm._ground.ids import Epoch, LoadId
from kvshm._ground.log import logger
from kvshm.config import Config
from kvshm.halves import Plan, SchedulerHalf
from kvshm.version import __version__

from .before_prefill import RequestImporter
from .imports import Import, Tables
from .request_span import given_id

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

log = logger(__name__)

Attributes = dict[str, Any]


def importer_for(
    vllm_config: Any, cache: SchedulerHalf, config: Config, block_size: int, num_ranks: int
) -> RequestImporter:
    """Return an engine's importer: one that makes spans if vLLM traces."""
    endpoint = vllm_config.observability_config.otlp_traces_endpoint
    tracer = None if endpoint is None else find_tracer(endpoint)
    if tracer is None:
        return RequestImporter(cache, config, block_size, num_ranks)
    return TracedImporter(tracer, cache, config, block_size, num_ranks)


def find_tracer(endpoint: str) -> Tracer | None:
    """Return a tracer of the provider that vLLM has made in this process.  Where vLLM makes none
    (an EngineCore whose API servers are several processes), of one that exports to the same
    endpoint.  None, with the reason in the log, if OpenTelemetry cannot be used."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            provider = _new_provider(endpoint)
        return provider.get_tracer("kvshm", __version__)
    except Exception as exc:  # any: traces are no reason not to serve
        log.warning("no trace spans: %s", exc)
        return None


def _new_provider(endpoint: str) -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from vllm.tracing.otel import get_span_exporter

    provider = TracerProvider()  # its resource is that of the environment (OTEL_...)
    provider.add_span_processor(BatchSpanProcessor(get_span_exporter(endpoint)))
    return provider


def parent_of(headers: Mapping[str, str] | None) -> Context | None:
    """Return the context of vLLM's span of a request; if its id is not known (request_span), that
    of its parent, which the request's headers name.  None if they name none: vLLM then begins a
    trace when the request ends, unknown before."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(headers or {})
    outer = trace.get_current_span(context).get_span_context()
    if not outer.is_valid:
        return None
    if not (span_id := given_id(headers)):
        return context
    request = trace.SpanContext(outer.trace_id, span_id, True, outer.trace_flags, outer.trace_state)
    return trace.set_span_in_context(trace.NonRecordingSpan(request))


@dataclass
class _Lookups:
    """A request's lookups until it is scheduled."""

    parent: Context
    times: int = 0
    begun: int = 0
    """Nanoseconds since 1970, as all times of spans."""
    ended: int = 0
    about: Attributes = field(default_factory=dict)


@dataclass
class _Load:
    """What the spans of a load need besides the Import."""

    parent: Context
    peers: list[str]


class TracedImporter(RequestImporter):
    """Makes spans of the requests that carry a trace's headers.  Scheduler's thread."""

    def __init__(self, tracer: Tracer, *args: Any) -> None:
        super().__init__(*args)
        self._tracer: Tracer | None = tracer
        """None once it has failed: the engine goes on without spans."""
        self._lookups: dict[str, _Lookups] = {}
        """By request."""
        self._loads: dict[LoadId, _Load] = {}
        """By load."""

    def match(self, request: Any, num_local_tokens: int) -> int | None:
        if self._tracer is None or not request.trace_headers:
            return super().match(request, num_local_tokens)
        missed, begun = self._misses(), time.time_ns()
        found = super().match(request, num_local_tokens)
        self._safely(self._looked_up, request, num_local_tokens, begun, missed)
        return found

    def allocated(self, request: Any, tables: Tables, num_external: int) -> None:
        lookups = self._lookups.pop(request.request_id, None)
        if lookups is None:
            super().allocated(request, tables, num_external)
            return
        plan = self._plans.get(request.request_id)
        missed, begun = self._misses(), time.time_ns()
        super().allocated(request, tables, num_external)
        self._safely(self._add_lookup, lookups)
        if num_external > 0:
            self._safely(self._leased, request.request_id, lookups.parent, plan, begun, missed)

    def _finish(self, load_id: LoadId) -> Import:
        done = super()._finish(load_id)
        if (load := self._loads.pop(load_id, None)) is not None:
            self._safely(self._loaded, done, load)
        return done

    def drop(self, load_ids: Iterable[LoadId]) -> None:
        known = list(load_ids)
        for load_id in known:
            self._loads.pop(load_id, None)
        super().drop(known)

    def request_finished(self, request_id: str) -> None:
        super().request_finished(request_id)
        if (lookups := self._lookups.pop(request_id, None)) is not None:
            self._safely(self._add_lookup, lookups)  # it was never scheduled

    # -- the spans

    def _looked_up(
        self, request: Any, local_tokens: int, begun: int, missed: Mapping[str, int]
    ) -> None:
        request_id = request.request_id
        if (lookups := self._lookups.get(request_id)) is None:
            if (parent := parent_of(request.trace_headers)) is None:
                return
            lookups = self._lookups[request_id] = _Lookups(parent)
        plan = self._plans.get(request_id)
        whole = (request.num_tokens - 1) // self._block_size * self._block_size
        lookups.times += 1
        lookups.begun, lookups.ended = begun, time.time_ns()
        lookups.about = {
            "requested_tokens": max(0, whole - local_tokens),
            "hit_tokens": 0 if plan is None else plan.length * self._block_size,
            "local_tokens": local_tokens,
            "lookups": lookups.times,
            "peers": _names(plan),
            "miss": self._reason(missed),
        }

    def _add_lookup(self, lookups: _Lookups) -> None:
        self._add("lookup", lookups.parent, lookups.begun, lookups.ended, lookups.about)

    def _leased(
        self,
        request_id: str,
        parent: Context,
        plan: Plan | None,
        begun: int,
        missed: Mapping[str, int],
    ) -> None:
        ended = time.time_ns()
        made = next((i for i in reversed(self._new.values()) if i.request_id == request_id), None)
        if made is None:
            return
        load = made.load
        self._loads[load.load_id] = _Load(parent, _names(plan))
        about = {
            "blocks": len(load.targets),
            "lost": len(load.lost),
            "peers": _names(plan),
            "at_once": self.at_once.withholds(request_id),
            "miss": self._reason(missed),
        }
        self._add("lease", parent, begun, ended, about)

    def _loaded(self, done: Import, load: _Load) -> None:
        """All ranks have reported."""
        times = [report.times for report in done.reports if report.times is not None]
        now = time.time()
        begun = min((t.begun for t in times), default=now)
        copied = max((t.copied for t in times), default=now)
        checked = max((t.checked for t in times), default=now)
        at = [int(seconds * 1e9) for seconds in (begun, copied, checked)]
        targets, nbytes = done.load.targets, done.load.nbytes * len(times)
        paths = {str(path) for r in done.reports for path in r.paths if path is not None}
        about = {
            "blocks": len(targets),
            "bytes": nbytes,
            "path": sorted(paths),
            "peers": load.peers,
        }
        self._add("copy", load.parent, at[0], at[1], about)
        reasons = {str(f.reason) for report in done.reports for f in report.failures}
        good = sum(len(part.blocks) for part in done.good)
        about = {
            "blocks": good,
            "discarded": len(done.bad.intersection(targets)),
            "reasons": sorted(reasons),
        }
        self._add("recheck", load.parent, at[1], at[2], about)

    def _add(self, name: str, parent: Context, begun: int, ended: int, about: Attributes) -> None:
        assert self._tracer is not None  # ``_safely`` calls nothing then
        known = {f"kvshm.{key}": value for key, value in about.items() if value not in ("", [])}
        span = self._tracer.start_span(
            f"kvshm.{name}", context=parent, start_time=begun, attributes=known
        )
        span.end(ended)

    def _safely(self, method: Callable[..., None], *args: Any) -> None:
        if self._tracer is None:
            return
        try:
            method(*args)
        except Exception:  # any: the import has been dealt with, and must not count as failed
            self._tracer = None
            self._lookups.clear()
            self._loads.clear()
            log.warning("no more trace spans from this engine", exc_info=True)

    # -- why not

    def _misses(self) -> dict[str, int]:
        """The engine's counters of misses."""
        table = self._cache.table
        values = {} if table is None else table.counters.snapshot()
        return {name: count for name, count in values.items() if name.startswith("miss_")}

    def _reason(self, before: Mapping[str, int]) -> str:
        """Which of them has grown: the reason why nothing is imported.  Empty: none."""
        grown = (name for name, count in self._misses().items() if count > before.get(name, 0))
        return next(grown, "")


def _names(plan: Plan | None) -> list[str]:
    """The engines that hold the plan's blocks, without those of its own."""
    runs: Sequence[Any] = () if plan is None else plan.runs
    peers = (run.peer.info for run in runs)
    own = Epoch(0) if plan is None else plan.epoch
    return list(dict.fromkeys(info.name for info in peers if info.epoch != own))
