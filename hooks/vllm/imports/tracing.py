"""Trace spans of imports, below vLLM's span of the request (docs/operations.md, Traces).

Spans are made when their time is over, and handed to OpenTelemetry's own thread: no step waits for
a collector.  Unless vLLM traces (--otlp-traces-endpoint), OpenTelemetry is not imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from kvshm._base.ids import Epoch
from kvshm._base.log import logger
from kvshm.halves import Plan, SchedulerHalf
from kvshm.version import __version__

from ...log_lines import HookLine
from .request_import import Load, RequestImport, Way
from .request_span import given_id

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

log = logger(__name__)

Attributes = dict[str, Any]


def tracer_for(vllm_config: Any, cache: SchedulerHalf, block_size: int) -> ImportTracer | None:
    """Return what makes spans of an engine's imports; None unless vLLM traces."""
    endpoint = vllm_config.observability_config.otlp_traces_endpoint
    tracer = None if endpoint is None else find_tracer(endpoint)
    return None if tracer is None else ImportTracer(tracer, cache, block_size)


def find_tracer(endpoint: str) -> Tracer | None:
    """Return a tracer of vLLM's provider in this process, or, where it makes none (an EngineCore
    with several API servers), of one that exports to the same endpoint.  None, with the reason in
    the log, if OpenTelemetry cannot be used."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            provider = _new_provider(endpoint)
        return provider.get_tracer("kvshm", __version__)
    except Exception as exc:  # any: traces are no reason not to serve
        log.line(HookLine.NO_SPANS, exc)
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
    of its parent, which the headers name.  None if they name none."""
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


class Start(NamedTuple):
    """When something began, and how often each reason for a miss had been counted by then."""

    at: int  # nanoseconds since 1970, as all times of spans
    misses: dict[str, int]


@dataclass(slots=True)
class Trace:
    """What the spans of one import need."""

    parent: Context
    lookups: int = 0
    started: int = 0  # the last lookup
    ended: int = 0
    about: Attributes = field(default_factory=dict)
    peers: list[str] = field(default_factory=list)


def _safely(method: Callable[..., None]) -> Callable[..., None]:
    """End tracing with an error: the import has been dealt with, and must not count as failed."""

    @wraps(method)
    def call(self: ImportTracer, *args: Any) -> None:
        if self._tracer is None:
            return
        try:
            method(self, *args)
        except Exception:  # any, of OpenTelemetry's
            self._tracer = None
            log.line(HookLine.SPANS_ENDED, exc_info=True)

    return call


class ImportTracer:
    """Makes spans of the imports of requests that carry a trace's headers; listens when one was
    matched, leased and ended.  Scheduler's thread."""

    def __init__(self, tracer: Tracer, cache: SchedulerHalf, block_size: int) -> None:
        """``block_size``: tokens per hash."""
        self._tracer: Tracer | None = tracer  # None once it has failed
        self._cache, self._block_size = cache, block_size

    def now(self) -> Start:
        """Return the ``start`` of ``matched`` or ``leased``."""
        return Start(time.time_ns(), self._misses())

    @_safely
    def matched(self, import_: RequestImport, local_tokens: int, start: Start) -> None:
        """A request was looked up."""
        request, plan = import_.request, import_.plan
        if import_.trace is None:
            if (parent := parent_of(request.trace_headers)) is None:
                return
            import_.trace = Trace(parent)
        trace: Trace = import_.trace
        whole = (request.num_tokens - 1) // self._block_size * self._block_size
        trace.lookups += 1
        trace.started, trace.ended, trace.peers = start.at, time.time_ns(), _names(plan)
        trace.about = {
            "requested_tokens": max(0, whole - local_tokens),
            "hit_tokens": 0 if plan is None else plan.length * self._block_size,
            "local_tokens": local_tokens,
            "lookups": trace.lookups,
            "peers": trace.peers,
            "miss": self._reason(start.misses),
        }

    def _add_lookup(self, trace: Trace) -> None:
        self._add("lookup", trace.parent, trace.started, trace.ended, trace.about)

    @_safely
    def leased(self, import_: RequestImport, plan: Plan | None, start: Start) -> None:
        """Blocks were allocated, and those of the plan leased if anything is to be loaded."""
        ended, trace = time.time_ns(), import_.trace
        self._add_lookup(trace)
        if not import_.has_load:
            import_.trace = None
            return
        order = import_.load.order
        trace.peers = _names(plan)
        about = {
            "blocks": len(order.targets),
            "lost": len(order.lost),
            "peers": trace.peers,
            "at_once": import_.way is Way.AT_ONCE,
            "miss": self._reason(start.misses),
        }
        self._add("lease", trace.parent, start.at, ended, about)

    @_safely
    def ended(self, import_: RequestImport) -> None:
        """Its load has ended, or its request before anything was allocated."""
        trace, import_.trace = import_.trace, None
        if import_.has_load:
            self._loaded(import_.load, trace)
        else:
            self._add_lookup(trace)  # it was never scheduled

    def _loaded(self, load: Load, trace: Trace) -> None:
        times = [report.times for report in load.reports if report.times is not None]
        now = time.time()
        started = min((t.begun for t in times), default=now)
        copied = max((t.copied for t in times), default=now)
        checked = max((t.checked for t in times), default=now)
        at = [int(seconds * 1e9) for seconds in (started, copied, checked)]
        targets, nbytes = load.order.targets, load.order.nbytes * len(times)
        paths = {str(path) for r in load.reports for path in r.paths if path is not None}
        about = {
            "blocks": len(targets),
            "bytes": nbytes,
            "path": sorted(paths),
            "peers": trace.peers,
        }
        self._add("copy", trace.parent, at[0], at[1], about)
        reasons = {str(f.reason) for report in load.reports for f in report.failures}
        about = {
            "blocks": sum(len(part.blocks) for part in load.good),
            "discarded": len(load.bad.intersection(targets)),
            "reasons": sorted(reasons),
        }
        self._add("recheck", trace.parent, at[1], at[2], about)

    def _add(self, name: str, parent: Context, start: int, end: int, about: Attributes) -> None:
        assert self._tracer is not None  # else ``_safely`` calls nothing
        known = {f"kvshm.{key}": value for key, value in about.items() if value not in ("", [])}
        span = self._tracer.start_span(
            f"kvshm.{name}", context=parent, start_time=start, attributes=known
        )
        span.end(end)

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
