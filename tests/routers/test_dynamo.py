"""NVIDIA Dynamo's indexer, which its routers ask, listens to the streams of two nodes: it finds on
each node what any of its engines has.

vLLM's own publishers stand for engines.  Dynamo hashes tokens itself, so what it finds also shows
that tokens, parents and block sizes arrive as it needs them."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from local_node import free_port

pytest.importorskip("vllm")

from ..multiprocess.event_streams import EventsProcess
from ..multiprocess.processes import Node, fresh_node, wait_until
from ..vllm.publishing import SIZE, Publisher, cleared, publishers, removed, stored
from ..vllm.test_event_stream import Streams

pytestmark = [pytest.mark.routers, pytest.mark.timeout(600)]

WHEELS = Path(sys.prefix) / "routers"
MODEL = "m"


class Dynamo:
    def __init__(self, node: Node, *engines: Publisher) -> None:
        self._engines = engines
        self._url = f"http://127.0.0.1:{free_port()}"
        port = self._url.rpartition(":")[2]
        command = (sys.executable, "-m", "dynamo.indexer", "--port", port)
        environ = {**os.environ, "PYTHONPATH": str(WHEELS)}
        self._process = node.processes.start("dynamo", *command, environ=environ)
        wait_until(self._is_up, "Dynamo's indexer serves")

    def register(self, instance: int, events: EventsProcess) -> None:
        endpoints = {"endpoint": events.bind, "replay_endpoint": events.replay}
        about = {"instance_id": instance, "model_name": MODEL, "block_size": SIZE, "dp_rank": 0}
        assert self._ask("/register", about | endpoints) == {"status": "ok"}

    def wait_for(self, *blocks: int, on: dict[int, int]) -> None:
        """Until it finds that many of these blocks, from the first on, on each instance.

        Whatever it has missed, it asks for when it hears the next batch, as all subscribers."""

        def finds() -> bool:
            for engine in self._engines:
                if engine.process.is_alive():
                    engine.publish(plain(9), removed(9))
            return self._find(*blocks) == on

        wait_until(finds, f"{blocks} are found on {on}")

    def _find(self, *blocks: int) -> dict[int, int]:
        tokens = [token for block in blocks for token in stored(block).token_ids]
        found = self._ask("/query", {"model_name": MODEL, "token_ids": tokens})["instances"]
        return {int(name): about["longest_matched"] // SIZE for name, about in found.items()}

    def _is_up(self) -> bool:
        try:
            return self._ask("/workers") == []
        except urllib.error.URLError:
            return False

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self._url + path, data, head)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)


@pytest.fixture
def streams() -> Iterator[Streams]:
    assert WHEELS.is_dir(), "make test-routers installs it"
    with fresh_node() as node, publishers() as start, ExitStack() as stack:
        yield Streams(node, start, stack)


def plain(*blocks: int, parent: int | None = None) -> Any:
    return stored(*blocks, parent=parent, extra_keys=None)


def test_a_prefix_is_on_a_node_from_its_first_copy_to_its_last(streams: Streams) -> None:
    a, b, c = map(streams.engine, "abc")
    a.publish(plain(1, 2, 3))  # before anyone listens
    dynamo = Dynamo(streams.node, a, b, c)
    dynamo.register(1, streams.events(a.source, b.source))
    dynamo.register(2, streams.events(c.source))
    dynamo.wait_for(1, 2, 3, on={1: 3})
    b.publish(plain(1, 2), plain(4, parent=2))
    c.publish(plain(1))
    dynamo.wait_for(1, 2, 4, on={1: 3, 2: 1})
    a.publish(removed(3, 2))
    dynamo.wait_for(1, 2, 3, on={1: 2, 2: 1})
    b.publish(removed(4, 2))
    dynamo.wait_for(1, 2, 3, on={1: 1, 2: 1})
    b.publish(cleared())
    c.kill()
    dynamo.wait_for(1, 2, 3, on={1: 1})
    a.kill()
    dynamo.wait_for(1, 2, 3, on={})


def test_a_stream_that_was_started_anew_is_believed(streams: Streams) -> None:
    a = streams.engine("a")
    events = streams.events(a.source)
    dynamo = Dynamo(streams.node, a)
    dynamo.register(1, events)
    a.publish(plain(1, 2, 3))
    dynamo.wait_for(1, 2, 3, on={1: 3})
    events.process.signal(signal.SIGKILL)
    events.process.wait()
    a.publish(removed(3))
    events.start()
    dynamo.wait_for(1, 2, 3, on={1: 2})
