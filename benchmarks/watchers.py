"""Everything by which an operator can watch a node, switched on at the same time (compare.py)."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from local_node import free_port

SCRAPE_SECONDS = 1.0
TRACED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
"""Headers with which vLLM makes spans for a request."""


class _Collector(BaseHTTPRequestHandler):
    """Takes trace spans and throws them away."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def trace_collector() -> Iterator[tuple[Mapping[str, str], tuple[str, ...]]]:
    """A context with a collector on loopback: settings and arguments of engines that use it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        settings = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        yield settings, ("--otlp-traces-endpoint", endpoint)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Watchers:
    """``kvshm top`` once a second, and ``kvshm metrics`` scraped as often: they run within
    ``watching`` and are stopped outside of it, so that they take nothing from other nodes."""

    def __init__(self, run_dir: Path, namespace: str) -> None:
        place = ("--run-dir", str(run_dir), "--namespace", namespace)
        self._port = free_port()
        listen = ("metrics", "--listen", f"127.0.0.1:{self._port}")
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "kvshm.tools.cli", *command, *place],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for command in (("top", "--json"), listen)
        ]
        self._scraping = threading.Event()
        self._ended = threading.Event()
        self._scraped = threading.Event()
        threading.Thread(target=self._scrape, daemon=True).start()

    def _scrape(self) -> None:
        while not self._ended.is_set():
            self._scraping.wait()
            with suppress(OSError, HTTPException):
                url = f"http://127.0.0.1:{self._port}/metrics"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    if answer.read():
                        self._scraped.set()
            self._ended.wait(SCRAPE_SECONDS)

    def wait_ready(self) -> None:
        """Wait until the metrics can be scraped.  Raises RuntimeError if a watcher has ended."""
        self._scraping.set()
        while not self._scraped.wait(1):
            self._raise_if_ended()
        self._pause()

    def _pause(self) -> None:
        self._scraping.clear()
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which they run."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
        self._scraping.set()
        try:
            yield
        finally:
            self._pause()

    def close(self) -> None:
        """End them.  Raises RuntimeError if one of them has ended before."""
        self._ended.set()
        self._scraping.set()
        with ExitStack() as reaped:
            for process in self._processes:
                reaped.callback(process.wait)
                reaped.callback(process.kill)
            self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        early = [process.args for process in self._processes if process.poll() is not None]
        if early:
            raise RuntimeError(f"these did not watch until the end: {early}")
