"""Trace spans of imports: vLLM's real scheduler, a real peer's table, OpenTelemetry's own exporter,
and a collector that decodes what arrives."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.tracing import otel
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import output_processor
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor

from kvshm._base.copy_path import CopyPath
from kvshm._base.ids import Epoch
from kvshm._engine.load_plan import CopyTimes, LoadFailure, LoadReport, PieceFailure
from kvshm.hooks.vllm.imports.request_span import SPAN_HEADER, announce_request_spans, given_id
from kvshm.hooks.vllm.imports.tracing import find_tracer, parent_of
from kvshm.interfaces import Region

from .odd_texts import TEXTS
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, prompt
from .several_groups import PEER, Played
from .several_groups import peer_of as peer_of

TRACE, OUTER, REQUEST = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "1122334455667788"
HEADERS = {"traceparent": f"00-{TRACE}-{OUTER}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{OUTER}-00"}


class Collector:
    """Takes spans over OTLP, as vLLM's exporter sends them."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.services.add(scope.scope.name)
                self.spans += scope.spans

    def named(self, e: DrivenEngine) -> dict[str, Any]:
        """The spans that the engine has made so far."""
        tracer: Any = e.connector._scheduler.importer._tracer._tracer
        assert tracer.span_processor.force_flush()
        assert len({span.name for span in self.spans}) == len(self.spans)
        return {span.name: span for span in self.spans}


def about(span: Any) -> dict[str, Any]:
    """A span's attributes."""
    said = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        said[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return said


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


@pytest.fixture
def traced(engine: Make, collector: Collector) -> Iterator[DrivenEngine]:
    e = engine(otlp_traces_endpoint=collector.endpoint)
    yield e
    if (tracer := e.connector._scheduler.importer._tracer._tracer) is not None:
        tracer.span_processor.shutdown()


def load_of(e: DrivenEngine, **headers: str) -> Any:
    """A request with a prefix that the peer has is scheduled; returns the step."""
    e.add("r", prompt(6), trace_headers={**HEADERS, **headers})
    return e.schedule()


def test_an_import_makes_four_spans_in_the_requests_trace(
    traced: DrivenEngine, peer_of: Any, collector: Collector
) -> None:
    e, before = traced, time.time_ns()
    peer = peer_of(e, Region(0, 4096, 4096, 64))
    peer.hold_all(prompt(6))
    sent = load_of(e)
    (load,) = sent.metadata.loads
    now = time.time()
    times = CopyTimes(now, now + 0.25, now + 0.5)
    failed = (PieceFailure(Epoch(PEER), LoadFailure.RECLAIMED, b""),)
    bad, paths = load.targets[-2:], (CopyPath.SHM,)
    Played(e).run(sent, LoadReport(load.load_id, bad, failed, 0.5, paths, times))
    spans = collector.named(e)
    assert set(spans) == {f"kvshm.{name}" for name in ("lookup", "lease", "copy", "recheck")}
    assert {(s.trace_id.hex(), s.parent_span_id.hex()) for s in spans.values()} == {(TRACE, OUTER)}
    ordered = [spans[f"kvshm.{name}"] for name in ("lookup", "lease", "copy", "recheck")]
    begins = [span.start_time_unix_nano for span in ordered]
    assert begins == sorted(begins)
    assert before <= begins[0]
    lookup, lease, copy, check = ordered
    assert copy.end_time_unix_nano == check.start_time_unix_nano
    for span in (copy, check):
        assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(250e6, rel=1e-3)
    name, length = peer.exporter.info.name, 6 * BLOCK_SIZE
    assert about(lookup) == {
        "kvshm.requested_tokens": length,
        "kvshm.hit_tokens": length,
        "kvshm.local_tokens": 0,
        "kvshm.lookups": 1,
        "kvshm.peers": [name],
    }
    assert about(lease) == {
        "kvshm.blocks": 6,
        "kvshm.lost": 0,
        "kvshm.peers": [name],
        "kvshm.at_once": False,
    }
    assert about(copy) == {
        "kvshm.blocks": 6,
        "kvshm.bytes": 6 * 4096,
        "kvshm.path": ["shm"],
        "kvshm.peers": [name],
    }
    assert about(check) == {
        "kvshm.blocks": 4,
        "kvshm.discarded": 2,
        "kvshm.reasons": ["reclaimed"],
    }


def test_spans_are_below_that_of_the_request_if_its_id_is_known(
    traced: DrivenEngine, peer_of: Any, collector: Collector
) -> None:
    peer_of(traced).hold_all(prompt(6))
    load_of(traced, **{SPAN_HEADER: REQUEST})
    spans = collector.named(traced).values()
    assert {(s.trace_id.hex(), s.parent_span_id.hex()) for s in spans} == {(TRACE, REQUEST)}


def test_a_miss_says_why(traced: DrivenEngine, peer_of: Any, collector: Collector) -> None:
    peer_of(traced)
    traced.step(None)
    load_of(traced)
    (lookup,) = collector.named(traced).values()
    said = about(lookup)
    assert (said["kvshm.hit_tokens"], said["kvshm.miss"]) == (0, "miss_no_owner")
    assert "kvshm.peers" not in said


def test_leases_that_were_lost_say_why(
    traced: DrivenEngine, peer_of: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = peer_of(traced)
    peer.hold_all(prompt(6))
    importer = traced.connector._scheduler.importer
    find = importer.lookups.find

    def find_and_lose(*args: Any) -> Any:
        plan = find(*args)
        peer.exporter.table.retract(list(range(1, peer.used + 1)))
        return plan

    monkeypatch.setattr(importer.lookups, "find", find_and_lose)
    sent = load_of(traced)
    (load,) = sent.metadata.loads
    Played(traced).run(sent, LoadReport(load.load_id, load.lost))
    spans = collector.named(traced)
    assert about(spans["kvshm.lease"])["kvshm.miss"] == "miss_lease_lost"
    assert about(spans["kvshm.lease"])["kvshm.lost"] == 6
    copy = spans["kvshm.copy"]
    assert copy.end_time_unix_nano == copy.start_time_unix_nano
    assert about(spans["kvshm.recheck"])["kvshm.blocks"] == 0
    assert importer.imports["r"].trace is None


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}, UNSAMPLED])
def test_a_request_outside_of_any_trace_makes_none(
    traced: DrivenEngine, peer_of: Any, collector: Collector, headers: dict[str, str] | None
) -> None:
    peer_of(traced).hold_all(prompt(6))
    traced.add("r", prompt(6), trace_headers=headers)
    traced.schedule()
    assert collector.named(traced) == {}


def test_a_request_that_is_never_scheduled_leaves_nothing_behind(
    traced: DrivenEngine, peer_of: Any, collector: Collector
) -> None:
    peer_of(traced).hold_all(prompt(6))
    importer = traced.connector._scheduler.importer
    traced.add("r", prompt(6), trace_headers=HEADERS)
    request = traced.scheduler.requests["r"]
    for _ in range(3):
        importer.match(request, 0)
    importer.request_finished("r")
    (lookup,) = collector.named(traced).values()
    assert about(lookup)["kvshm.lookups"] == 3
    assert importer.imports == {}


def test_an_error_ends_the_spans_and_nothing_else(
    traced: DrivenEngine, peer_of: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    peer_of(traced).hold_all(prompt(6))
    importer = traced.connector._scheduler.importer
    monkeypatch.setattr(importer._tracer, "_add", lambda *_: [].pop())
    sent = load_of(traced)
    (load,) = sent.metadata.loads
    assert len(load.targets) == 6
    Played(traced).run(sent, LoadReport(load.load_id, ()))
    assert [line for line in lines if "spans" in line] == [
        "kvshm: no more trace spans from this engine"
    ]


def test_without_an_endpoint_nothing_is_traced(engine: Make) -> None:
    assert engine().connector._scheduler.importer._tracer is None


OFF = """
import sys
from types import SimpleNamespace
from kvshm.hooks.vllm import plugin
from kvshm.hooks.vllm.imports import importer as importer_module
from kvshm.hooks.vllm.imports import request_span
from kvshm.hooks.vllm.imports import tracing

off = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=None))
assert tracing.tracer_for(off, None, 16) is None
assert not [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]
"""


def test_without_an_endpoint_opentelemetry_is_not_imported() -> None:
    """By kvshm: vLLM imports it where it is installed."""
    subprocess.run([sys.executable, "-c", OFF], check=True)


def test_vllms_provider_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider(resource=Resource({"vllm.process_kind": "engine_core"}))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    tracer: Any = find_tracer("http://127.0.0.1:1/v1/traces")
    assert tracer.resource is provider.resource


# -- the front end


def test_a_request_passes_the_wrapped_methods_of_the_front_end() -> None:
    """docs/vllm-facts.md"""
    for adds, core in (
        (AsyncLLM._add_request, "engine_core.add_request_async("),
        (LLMEngine.add_request, "engine_core.add_request("),
    ):
        before, after, _ = inspect.getsource(adds).rpartition(core)
        assert "self.output_processor.add_request(" in before
        assert after == core
    makes = inspect.getsource(OutputProcessor.do_tracing)
    assert "extract_trace_context(engine_core_output.trace_headers)" in makes
    assert "instrument_manual(" in makes
    assert "trace.get_tracer(__name__)" in inspect.getsource(otel.manual_instrument_otel)
    assert otel.__name__ == "vllm.tracing.otel"
    core_source = inspect.getsource(Scheduler.update_from_output)
    assert "trace_headers=request.trace_headers" in core_source


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> tuple[OutputProcessor, InMemorySpanExporter]:
    """vLLM's output processor, with the wrappers, and the spans that it makes."""
    for name in ("add_request", "do_tracing"):
        monkeypatch.setattr(OutputProcessor, name, getattr(OutputProcessor, name))
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    announce_request_spans()
    announce_request_spans()
    monkeypatch.setattr(output_processor.RequestState, "from_new_request", lambda **_: STATE)
    return OutputProcessor(None, log_stats=True, tracing_enabled=True), exporter


TIMES = dict.fromkeys(("scheduled_ts", "queued_ts", "first_token_ts", "last_token_ts"), 2.0)
STATE: Any = SimpleNamespace(
    stats=SimpleNamespace(
        arrival_time=1.0, first_token_latency=0.5, num_generation_tokens=1, **TIMES
    ),
    prompt_token_ids=[1, 2],
    prompt_embeds=None,
    external_req_id="x",
    top_p=None,
    max_tokens_param=None,
    temperature=None,
    n=None,
)


def test_the_requests_span_gets_the_id_that_was_announced(front_end: Any) -> None:
    processor, exporter = front_end
    ids = []
    for number, headers in enumerate((HEADERS, HEADERS, None)):
        request = SimpleNamespace(request_id=f"r{number}", trace_headers=headers)
        processor.add_request(request, None)
        ids.append(int((request.trace_headers or {}).get(SPAN_HEADER, "0"), 16))
        ended = SimpleNamespace(trace_headers=request.trace_headers)
        processor.do_tracing(ended, STATE, SimpleNamespace(iteration_timestamp=3.0))
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["llm_request"] * 3
    assert [span.context.span_id for span in spans][:2] == ids[:2]
    assert spans[2].context.span_id != 0 == ids[2]
    assert {f"{span.context.trace_id:032x}" for span in spans[:2]} == {TRACE}
    assert {f"{span.parent.span_id:016x}" for span in spans[:2]} == {OUTER}
    assert {"traceparent": f"00-{TRACE}-{OUTER}-01"} == HEADERS
    with trace.get_tracer("vllm.tracing.otel").start_as_current_span("another") as span:
        assert span.get_span_context().span_id not in ids  # each id is given once


NO_IDS = (
    *TEXTS.values(),
    "-123456789abcdef",
    "0x23456789abcdef",
    " 23456789abcdef ",
    "1_3456789abcdef0",
)


@pytest.mark.parametrize("text", [*NO_IDS, "\u0661" * 16, None, 7])
def test_headers_are_not_what_they_should_be(text: Any) -> None:
    """Clients choose them: they name no span, and raise nothing, which would end all traces."""
    assert given_id({SPAN_HEADER: text}) == 0
    if isinstance(text, str):
        for headers in ({"traceparent": text}, {**HEADERS, "tracestate": text}):
            parent_of({**headers, SPAN_HEADER: text})
