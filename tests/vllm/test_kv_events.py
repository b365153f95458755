"""KV events of an engine that imports: what subscribers make of them is what its pool holds.

vLLM's real scheduler, publisher and replay socket, and the random work of test_at_once.py: imports
that arrive, fail and are undone, evictions, preemptions, aborts and resets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.kv_events import KVEventsConfig
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from kvshm.tools.events.copies import last_bits
from kvshm.tools.events.wire import Event

from ..multiprocess.event_streams import Router
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, prompt
from .several_groups import KINDS
from .test_at_once import Node, work

Block = tuple[int, int]
"""Group and the last 64 bits of the hash."""


class Ledger(Router):
    """Counts copies, since vLLM stores and removes each of two blocks with equal contents."""

    def __init__(self, config: Any, chains: dict[bytes, list[int]]) -> None:
        self._chains = chains
        self.copies: Counter[Block] = Counter()
        super().__init__(config.endpoint, config.replay_endpoint)

    def hear(self, events: Iterable[Event], rank: int = 0) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.copies.clear()
                continue
            assert event["medium"] == "GPU"
            names = [(event["group_idx"], block) for block in event["block_hashes"]]
            if event["type"] == "BlockStored":
                self.copies.update(names)
                self._check(event)
            else:
                self.copies.subtract(names)
                assert min(self.copies[name] for name in names) >= 0, "removed once too often"

    def _check(self, event: Event) -> None:
        """The tokens are those of its hashes and its parent."""
        chains = {last_bits(block): tokens for block, tokens in self._chains.items()}
        tokens, size, parent = event["token_ids"], event["block_size"], event["parent_block_hash"]
        before = [] if parent is None else chains[parent]
        assert size % BLOCK_SIZE == 0
        for block in event["block_hashes"]:
            whole = chains[block]
            assert whole[: len(before)] == before
            assert (before + tokens)[: len(whole)] == whole


def in_pool(engine: DrivenEngine) -> Counter[Block]:
    """What requests of the engine can hit, with the number of its copies."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    found = Counter[Block]()
    for key, blocks in pool.cached_block_hash_to_block._cache.items():
        name = get_group_id(key), last_bits(bytes(get_block_hash(key)))
        found[name] = len(blocks) if isinstance(blocks, dict) else 1
    return found


def assert_known(ledger: Ledger, engine: DrivenEngine) -> None:
    """To be called after a step's output: with it events are published."""
    publisher = engine.scheduler.kv_event_publisher
    publisher._event_queue.join()
    last = publisher._buffer[-1][0] if publisher._buffer else -1
    ledger.wait_until(lambda: ledger.last == last)
    assert +ledger.copies == in_pool(engine)


class Announced(Node):
    """The engine of test_at_once.py, and a subscriber that was there from the start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ledger = ledger_of(self.e, self.chains)
        self.compared = 0

    def run(self) -> None:
        super().run()
        assert_known(self.ledger, self.e)
        self.compared += 1


def ledger_of(engine: DrivenEngine, chains: dict[bytes, list[int]]) -> Ledger:
    return Ledger(engine.scheduler.kv_event_publisher.get_publisher_config(), chains)


def announcing(run_dir: Path) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{run_dir}/e",
        replay_endpoint=f"ipc://{run_dir}/r",
    )


LIVES: list[tuple[str | None, bool, int]] = [
    (None, asynchronous, seed) for asynchronous in (False, True) for seed in range(3)
]
LIVES += [(kind, True, 0) for kind in KINDS]


@pytest.mark.parametrize(("kind", "asynchronous", "seed"), LIVES)
def test_subscribers_know_exactly_what_the_pool_holds(
    engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    kind: str | None,
    asynchronous: bool,
    seed: int,
) -> None:
    specs = KINDS[kind] if kind else ()
    e = engine(
        asynchronous,
        14 + 14 * max(1, len(specs)),
        specs,
        max_num_batched_tokens=72,
        max_num_seqs=8,
        kv_events_config=announcing(tmp_path_factory.mktemp("e")),
    )
    node = Announced(e, random.Random(seed))
    work(node, monkeypatch)
    assert node.compared > 300
    with node.ledger, ledger_of(e, node.chains) as late:
        assert late.copies == node.ledger.copies


def test_hashes_that_kvshm_drops_are_removed(
    engine: Make, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As it does when an adapter turns out to have other contents."""
    e = engine(kv_events_config=announcing(tmp_path_factory.mktemp("e")))
    request = e.add("r", prompt(3), max_tokens=9)
    chains = {
        bytes(h): prompt(3)[: (i + 1) * BLOCK_SIZE] for i, h in enumerate(request.block_hashes)
    }
    with ledger_of(e, chains) as ledger:
        e.step()
        assert_known(ledger, e)
        assert ledger.copies.total() == 3
        e.connector._scheduler._vllm.drop_hashes()
        e.step()
        assert_known(ledger, e)
        assert ledger.copies.total() == 0
