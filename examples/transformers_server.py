"""A small OpenAI-compatible server on transformers' continuous batching that shares prefixes.

    KVSHM_ENABLE=1 python examples/transformers_server.py --model DIRECTORY --port 8000

Serves ``POST /v1/completions`` for prompts of token ids, greedily, ``GET /health``, and
``GET /metrics`` with the numbers that vLLM has under the same names.  One line of it brings kvshm
in: ``share(manager)``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Served:
    """A manager, and which thread waits for which request."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        from kvshm.hooks.transformers import share

        torch.set_num_threads(options.threads)
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=options.dtype, attn_implementation=options.attention
        )
        self.manager = share(
            model.init_continuous_batching(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=options.page_size,
                    num_blocks=options.num_blocks,
                    max_batch_tokens=options.max_batch_tokens,
                    return_logprobs=True,
                ),
            ),
            salt=options.salt.encode(),
            wait_seconds=options.import_wait,
        )
        self.prompt_tokens = 0
        self._waiting: dict[str, queue.Queue[Any]] = {}
        self._number = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        self.manager.warmup()  # makes the cache, which joins the node
        self.manager.start()
        threading.Thread(target=self._deliver, daemon=True).start()

    def _deliver(self) -> None:
        for output in self.manager:
            self._waiting[output.request_id].put(output)

    def complete(self, prompt: list[int], max_tokens: int) -> Any:
        """Return transformers' output for one prompt; blocks until it is complete."""
        with self._lock:
            self._number += 1
            name = f"request-{self._number}"
            self.prompt_tokens += len(prompt)
        answers = self._waiting[name] = queue.Queue()
        try:
            self.manager.add_request(prompt, request_id=name, max_new_tokens=max_tokens)
            return answers.get()
        finally:
            del self._waiting[name]

    def metrics(self) -> Iterator[str]:
        """Yield what /metrics shows."""
        from kvshm.hooks.transformers import stats_of

        stats = stats_of(self.manager)
        local, imported = (stats.get(f"{n}_tokens", 0) for n in ("local_hit", "imported"))
        sources = {
            "local_compute": self.prompt_tokens - local - imported,
            "local_cache_hit": local,
            "external_kv_transfer": imported,
        }
        for source, tokens in sources.items():
            yield f'transformers:prompt_tokens_by_source_total{{source="{source}"}} {tokens}'
        counted = {"loads": "imports", "failed_loads": "failed_imports"}
        for name, key in {**counted, "imported_tokens": "imported_tokens"}.items():
            yield f'transformers:kvshm_{name}_total{{engine="0"}} {stats.get(key, 0)}'


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    served: Served

    def do_GET(self) -> None:
        lines = self.served.metrics() if self.path == "/metrics" else ()
        self._answer("".join(f"{line}\n" for line in lines), "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        output = self.served.complete(body["prompt"], body["max_tokens"])
        if output.error is not None:
            self._answer(_event({"error": output.error}), "text/event-stream")
            return
        tokens, logprobs = output.generated_tokens, output.logprobs
        tops = [{str(t): p} for t, p in zip(tokens, logprobs, strict=True)]
        choice = {"token_ids": tokens, "logprobs": {"top_logprobs": tops}, "text": ""}
        usage = {"prompt_tokens": len(output.prompt_ids), "completion_tokens": len(tokens)}
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        self._answer("".join(map(_event, events)) + "data: [DONE]\n\n", "text/event-stream")

    def _answer(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """No line per request."""


def _event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


def main() -> None:
    """Command line: serve until SIGTERM or SIGINT."""
    options = arguments()
    logging.basicConfig(level=logging.INFO)  # shows kvshm's lines, which vLLM's logger shows there
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    served = Served(options)
    served.start()
    handler = type("Handler", (Handler,), {"served": served})
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while not signals:
        time.sleep(0.1)
    server.shutdown()
    served.manager.stop(hard_stop=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", default="sdpa", help="an attn_implementation")
    parser.add_argument("--page-size", type=int, default=128, help="tokens per block")
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--salt", default="", help="only engines with the same one share")
    parser.add_argument("--import-wait", type=float, default=1.0, help="seconds, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--core", type=int, help="the one CPU core to run on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
