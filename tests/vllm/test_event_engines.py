"""KV events of two real engines that share, and the one stream that is made of them: what they say
is what the engines' caches hold, through imports, evictions, a reset and a death."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_node import Engine, EngineSpec
from sharing_node import BLOCK_SIZE, observe

from kvshm.tools.events.copies import last_bits
from kvshm.tools.events.wire import Event

from ..multiprocess.event_streams import EventsProcess, Router
from ..multiprocess.processes import real_processes
from .engines import SharedNode
from .oracle import prompts, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(1200)]

FEW_BLOCKS = 20
SHORT = EngineSpec.longest_prompt((FEW_BLOCKS - 1) * BLOCK_SIZE)


class OfEngine(Router):
    """Listens to one engine, which says of a block that it has twice that it is stored twice."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._there: set[Any] = set()
        super().__init__(*endpoints(run_dir, name))

    def hear(self, events: Iterable[Event], rank: int = 0) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._there.clear()
            elif event["type"] == "BlockStored":
                self._there.update(event["block_hashes"])
            else:
                self._there.difference_update(event["block_hashes"])

    @property
    def hashes(self) -> set[Any]:
        return self._there


def endpoints(run_dir: Path, name: str) -> tuple[str, str]:
    return f"ipc://{run_dir}/{name}.ev", f"ipc://{run_dir}/{name}.re"


def spec(node: SharedNode, name: str, core: int, model: Path) -> EngineSpec:
    events, replay = endpoints(node.run_dir, name)
    config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
    arguments = ("--kv-events-config", json.dumps(config))
    return EngineSpec(name, model, core, FEW_BLOCKS, (*SHORT, *arguments))


def test_what_engines_and_their_stream_say_is_what_their_caches_hold(model: Path) -> None:
    with SharedNode() as node, real_processes() as processes:
        node.start_coordinator()
        a, b = node.start_engines(*(spec(node, name, i, model) for i, name in enumerate("ab")))
        node.wait_joined(a, b)
        place: Any = SimpleNamespace(run_dir=node.run_dir, processes=processes)
        urls = [f"http://127.0.0.1:{engine.port}" for engine in (a, b)]
        events = EventsProcess(place, *urls)
        with (
            OfEngine(node.run_dir, "a") as of_a,
            OfEngine(node.run_dir, "b") as of_b,
            Router.of(events) as of_node,
        ):

            def agree(*engines: Engine) -> None:
                """What the engines show to others is what subscribers know."""
                listeners = {a: of_a, b: of_b}
                for engine in engines:
                    waits_until_equal(node, listeners[engine], engine)
                waits_until_equal(node, of_node, *engines)

            sent = list(prompts(12, seed=970))
            first, *others = sent
            with node.sharing(a, shareable(first)):
                a.complete(first)
            agree(a, b)
            assert len(of_node.hashes) == shareable(first)
            with observe(node, b) as seen:
                b.complete(first)
            assert seen.imported_blocks == shareable(first)
            agree(a, b)
            assert len(of_b.hashes) >= shareable(first)

            for number, prompt in enumerate(others):
                (a, b)[number % 2].complete(prompt)
                agree(a, b)
            assert sum(map(shareable, sent)) > 2 * FEW_BLOCKS

            node.reset(b)
            agree(a, b)
            b.complete(others[-1])
            agree(a, b)
            assert of_b.hashes
            node.kill(a)
            agree(b)
            assert of_node.hashes == of_b.hashes


def waits_until_equal(node: SharedNode, listener: Router, *engines: Engine) -> None:
    listener.wait_until(
        lambda: {last_bits(key) for key in node.shown_hashes(*engines)} == listener.hashes
    )
