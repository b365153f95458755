"""The id of vLLM's span of a request (``llm_request``), known before the request ends.

vLLM makes that span in the front end when the request has ended.  kvshm wraps two methods of the
front end: a request with a trace's headers gets a header with a new id, which travels to the
EngineCore and back, and vLLM's span gets this id.  Without the wrappers, spans of kvshm have the
parent that vLLM's span has.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping
from functools import wraps
from typing import Any

from kvshm._base.log import logger

from ...log_lines import HookLine

log = logger(__name__)

SPAN_HEADER = "kvshm-request-span"
"""Its value: 16 hexadecimal digits."""
_SPAN_ID = re.compile("[0-9a-f]{16}")
_TRACER = "vllm.tracing.otel"
"""The tracer with which vLLM makes this span."""

_given = threading.local()


class GivenIds:
    """An id generator that first hands out the id that the calling thread has set, once."""

    def __init__(self, others: Any) -> None:
        self._others = others

    def generate_span_id(self) -> int:
        span_id, _given.span_id = getattr(_given, "span_id", 0), 0
        return span_id or int(self._others.generate_span_id())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)


def announce_request_spans() -> None:
    """Wrap vLLM's OutputProcessor in this process, once, unless this vLLM is another one."""
    try:
        from vllm.v1.engine.output_processor import OutputProcessor

        if getattr(OutputProcessor.do_tracing, "kvshm", False):
            return
        arrives, ends = OutputProcessor.add_request, OutputProcessor.do_tracing
    except (ImportError, AttributeError) as exc:
        log.line(HookLine.SPANS_BESIDE, exc)
        return

    @wraps(arrives)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self.tracing_enabled and request.trace_headers and _gives_ids():
            more = {SPAN_HEADER: f"{secrets.randbits(64) | 1:016x}"}
            request.trace_headers = {**request.trace_headers, **more}
        return arrives(self, request, *args, **kwargs)

    @wraps(ends)
    def do_tracing(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        _given.span_id = given_id(output.trace_headers)
        try:
            return ends(self, output, *args, **kwargs)
        finally:
            _given.span_id = 0

    do_tracing.kvshm = True  # type: ignore[attr-defined]  # marks kvshm's wrapper
    OutputProcessor.add_request, OutputProcessor.do_tracing = add_request, do_tracing


def given_id(headers: Mapping[str, str] | None) -> int:
    """Return the id in these headers, 0: none.  A client may have chosen them."""
    text: object = (headers or {}).get(SPAN_HEADER)
    return int(text, 16) if isinstance(text, str) and _SPAN_ID.fullmatch(text) else 0


def _gives_ids() -> bool:
    """Have vLLM's tracer take ids that are given; whether it does."""
    try:
        from opentelemetry import trace

        for maker in (trace.get_tracer_provider(), trace.get_tracer(_TRACER)):
            ids: Any = maker
            if not isinstance(ids.id_generator, GivenIds):
                ids.id_generator = GivenIds(ids.id_generator)
        return True
    except Exception:  # any: then spans stand beside vLLM's
        return False
