"""Whatever a manager lets others read holds what its key says, and is of the weights of its epoch.

transformers' real batch processors, schedulers and caches run random work; the model is played: a
token's KV is a number made of the weights, the token and the number of the token before, read from
where the block table says.  So a block that was reused too early, shared before it was complete or
begun with other weights gives other numbers, also in all that is computed from it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from kvshm import PublishedBlock, Reader, prefix_keys
from kvshm.hooks.transformers import node_of

from ..waiting import until
from .conftest import MakeManager
from .managers import cache_of, counts, know_each_other

pytestmark = pytest.mark.multiprocess

PAGE_SIZE = 4
NUM_BLOCKS = 16
STEPS = 600
WORD = 8


def kv_of(weights: int, before: int, token: int) -> int:
    """The KV of a token behind the one with the KV ``before``."""
    return hash((weights, before, token))


@dataclass
class Played:
    manager: Any
    rnd: random.Random
    processor: Any = None
    weights: int = 0
    weights_of: dict[int, int] = field(default_factory=dict)
    tokens_of: dict[bytes, list[int]] = field(default_factory=dict)
    added: int = 0
    looked_at: int = 0

    def __post_init__(self) -> None:
        # For manager.pause(), which asks a running loop to stand still.
        self.manager._generation_thread = threading.current_thread()
        status = self.manager.background_thread_status
        status.acquire_pause = status.release_pause = lambda *_: None
        self.processor = self.manager.batch_processor = self.manager._create_batch_processor()
        self.processor._generation_step = self.compute
        self.allocator = cache_of(self.manager)._allocator

    # -- the model

    def word(self, table: list[int], position: int) -> Any:
        """Where a token's number lies, as a tensor of one word."""
        block, place = divmod(position, PAGE_SIZE)
        at = table[block] * self.allocator.bytes_per_block + place * WORD
        return cache_of(self.manager).cache_tensor[at : at + WORD].view(torch.int64)

    def compute(self, _: object = None) -> None:
        batch = self.processor.inputs_and_outputs
        for future in batch.requests_in_batch:
            state = future.state
            tokens = state.initial_tokens + state.generated_tokens
            table = self.allocator.block_table[state.request_id]
            for p in range(state.position_offset - future.query_length, state.position_offset):
                before = int(self.word(table, p - 1)) if p else 0
                self.word(table, p).fill_(kv_of(self.weights, before, tokens[p]))
        sampled = [self.rnd.randint(1, 3) for _ in batch.requests_in_batch]
        batch.output_ids[0, : len(sampled)] = torch.tensor(sampled, dtype=torch.int32)

    # -- random work

    def add(self) -> None:
        start, length = self.rnd.choice((0, 0, 50, 100)), self.rnd.randint(2, 6 * PAGE_SIZE)
        prompt = [start + i for i in range(length)]
        prompt += [self.rnd.randint(1, 3) for _ in range(self.rnd.choice((0, PAGE_SIZE)))]
        self.manager.add_request(
            prompt, request_id=f"r{self.added}", max_new_tokens=self.rnd.randint(1, 3 * PAGE_SIZE)
        )
        self.added += 1

    def cancel(self) -> None:
        scheduler = self.processor.scheduler
        if names := [*scheduler.active_requests, *scheduler.waiting_requests]:
            self.manager.cancel_request(self.rnd.choice(names))

    def new_weights(self) -> None:
        self.weights += 1
        with self.manager.pause(), torch.no_grad():
            self.manager.model.lm_head.weight[0, 0] = self.weights

    def step(self) -> None:
        if self.processor.prepare_next_batch():
            self.note()
            self.processor._generation_step(None)
            self.processor.update_batch()
            self.note()

    def note(self) -> None:
        """Remember which tokens stand behind which key."""
        for state in self.processor.scheduler.active_requests.values():
            tokens = state.initial_tokens + state.generated_tokens
            for index, key in enumerate(prefix_keys(tokens, PAGE_SIZE)):
                self.tokens_of[key] = tokens[: (index + 1) * PAGE_SIZE]

    # -- what must hold at any moment

    def readable(self, reader: Reader) -> Iterator[PublishedBlock]:
        name = node_of(self.manager).name
        for engine in reader.engines():
            if engine.name == name:
                self.weights_of.setdefault(engine.epoch, self.weights)
                yield from reader.list(engine.epoch)

    def check(self, reader: Reader, tokens_of: dict[bytes, list[int]]) -> None:
        first = cache_of(self.manager).importer._first
        for block in self.readable(reader):
            pure = pure_kv(self.weights_of[block.epoch], tokens_of[block.key])
            table = [block.block_id + first]
            found = [int(self.word(table, place)) for place in range(PAGE_SIZE)]
            assert found == pure[-PAGE_SIZE:], f"{block} holds something else"
            self.looked_at += 1


def pure_kv(weights: int, tokens: list[int]) -> list[int]:
    kv: list[int] = []
    for token in tokens:
        kv.append(kv_of(weights, kv[-1] if kv else 0, token))
    return kv


def settle(a: Played, b: Played, reader: Reader) -> None:
    """Wait until each knows what the other has published, if they share at all."""
    if a.weights != b.weights:
        return
    know_each_other(a.manager, b.manager)
    for one, other in ((a, b), (b, a)):
        keys = [block.key for block in one.readable(reader)]
        until(lambda other=other, keys=keys: "" not in node_of(other.manager).contains(keys))


def work(a: Played, b: Played, rnd: random.Random) -> None:
    """Random work, after each bit of which all that others may read is checked."""
    with Reader() as reader:
        for _ in range(STEPS):
            one, kind = rnd.choice((a, b)), rnd.random()
            if kind < 0.2:
                one.add()
            elif kind < 0.22:
                one.cancel()
            elif kind < 0.23:
                for both in (a, b) if rnd.random() < 0.7 else (one,):
                    both.new_weights()
            elif kind < 0.35:
                settle(a, b, reader)
            else:
                one.step()
            for each in (a, b):
                each.check(reader, a.tokens_of | b.tokens_of)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_what_others_may_read_is_what_it_says(manager: MakeManager, seed: int) -> None:
    rnd = random.Random(seed)
    options = {"page_size": PAGE_SIZE, "num_blocks": NUM_BLOCKS, "max_batch_tokens": 10}
    a, b = (
        Played(manager(name=f"played-{seed}-{name}", **options), rnd) for name in ("one", "other")
    )
    settle(a, b, Reader())
    work(a, b, rnd)
    assert min(a.looked_at, b.looked_at) > 200
    assert counts(a.manager).imports + counts(b.manager).imports > 0
