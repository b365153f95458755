"""Whatever others may read holds what its hash says, and is of the weights of its epoch.

vLLM's real schedulers and the real connector run random work; the model is played: a token's
KV is a number made of the weights, the token and the number before it, read from where the
block table says.  So a block that was begun with other weights, hit before it was computed, or
reused too early gives other numbers, also in all that is computed from it.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvshm.engine.load_plan import Load, LoadReport
from kvshm.hooks.vllm.messages import RankReport
from kvshm.shm.layout import SlotState
from kvshm.shm.own_slot_table import OwnSlotTable

from ..unit.served import set_life
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, as_told, description, prompt

SEEDS = range(6)
GARBAGE = -1
FOREIGN = -2
"""Weights of another model, whose KV another connector brings."""
Kv = list[int]


def kv_of(weights: int, before: int, token: int) -> int:
    return hash((weights, before, token))


def contents(weights: int, tokens: list[int]) -> Kv:
    """KV of tokens that one set of weights has computed from the first on."""
    kv: Kv = []
    for token in tokens:
        kv.append(kv_of(weights, kv[-1] if kv else 0, token))
    return kv


@dataclass
class Written:
    """What a step computes of one request."""

    request: Request
    table: list[int]
    begin: int
    count: int
    samples: bool
    loaded: range
    """Indices of the blocks that another connector fills before the step computes."""


@dataclass
class Step:
    sent: Sent
    writes: list[Written]


@dataclass
class Import:
    """A load of kvshm's under way."""

    load: Load
    request: Request
    epoch: int
    bad: set[int] | None = None
    """Targets that did not arrive, once it has ended."""


@dataclass
class Node:
    """The engine, its one rank, and what lies in the rank's memory."""

    e: DrivenEngine
    rnd: random.Random
    weights: int = 0
    weights_of: dict[int, int] = field(default_factory=dict)
    """Epoch -> the weights it was described with."""
    described: int | None = 0
    changed: bool = False
    epoch: int = 0
    memory: dict[int, Kv] = field(default_factory=dict)
    tokens: dict[bytes, list[int]] = field(default_factory=dict)
    steps: deque[Step] = field(default_factory=deque)
    imports: list[Import] = field(default_factory=list)
    others: dict[str, range] = field(default_factory=dict)
    """Requests whose next step another connector loads for, and which of their blocks."""
    added: int = 0
    seen: int = 0

    def __post_init__(self) -> None:
        self.side = self.e.connector._scheduler
        self.memory = {b: [GARBAGE] * BLOCK_SIZE for b in range(self.e.num_blocks)}
        self.weights_of[self.e.table.epoch] = 0
        self.epoch = self.e.table.epoch

    # -- the connector's answers, as if there were peers and another connector

    def found(self, request: Request, local: int) -> tuple[int | None, bool]:
        first, last = local // BLOCK_SIZE, (request.num_tokens - 1) // BLOCK_SIZE
        kind = self.rnd.random()
        self.others.pop(request.request_id, None)
        if not self.side.may_import():
            return 0, False
        if first >= last or kind < 0.5 or request.request_id in self.side.importer._failed:
            return 0, False
        count = self.rnd.randint(1, last - first)
        if kind < 0.53:
            self.others[request.request_id] = range(first, first + count)
            return count * BLOCK_SIZE, False
        if kind < 0.55 or not self.side.importer.may_share(request):
            return (None if kind < 0.55 else 0), False
        return count * BLOCK_SIZE, True

    def allocated(self, request: Request, blocks: Any, num_external: int) -> None:
        ours = request.request_id not in self.others
        tables = [[block.block_id for block in table] for table in blocks.blocks]
        self.side.importer.allocated(request, tables, num_external if ours else 0)

    # -- random work

    def add(self) -> None:
        start, name = self.rnd.choice((1, 1, 1, 500)), f"r{self.added}"
        length = self.rnd.randint(3, 6 * BLOCK_SIZE)
        tokens = prompt(6, first=start)[:length]
        if self.rnd.random() < 0.5:
            tokens += [self.rnd.randint(1, 3) for _ in range(self.rnd.randint(1, BLOCK_SIZE))]
        request = self.e.add(name, tokens, max_tokens=self.rnd.randint(1, 40))
        if self.rnd.random() < 0.1:
            request.kv_transfer_params = {"kvshm": {"share": False}}
        if self.rnd.random() < 0.3:
            request.sampling_params.stop_token_ids = [2]
        self.note(request)
        self.added += 1

    def abort(self) -> None:
        if names := list(self.e.scheduler.requests):
            self.e.scheduler.finish_requests(self.rnd.choice(names), RequestStatus.FINISHED_ABORTED)

    def new_weights(self) -> None:
        self.end_loads()  # some just in time, which is reported later
        self.weights += 1
        self.described, self.changed, self.epoch = None, True, 0
        if (table := self.side.cache.table) is not None:
            table.end_life(0)

    def reset(self) -> None:
        """Forced ones free the blocks of steps in flight; loads under way, which this rank does
        not give up, are in their way."""
        forced, connector = self.rnd.random() < 0.5, self.rnd.random() < 0.5
        try:
            self.e.scheduler.reset_prefix_cache(forced, connector)
        except RuntimeError:
            assert forced
            assert self.imports or any(step.sent.metadata.loads for step in self.steps)

    def schedule(self) -> None:
        before = {r: q.num_computed_tokens for r, q in self.e.scheduler.requests.items()}
        sent = self.e.schedule()
        writes = []
        for name, count in sent.output.num_scheduled_tokens.items():
            request = self.e.scheduler.requests[name]
            begin = request.num_computed_tokens - count
            loaded = self.others.pop(name, range(0))
            assert begin >= before[name] or request.num_preemptions
            table = self.e.blocks_of(name)
            samples = not request.is_prefill_chunk
            writes.append(Written(request, table, begin, count, samples, loaded))
            for index in {p // BLOCK_SIZE for p in range(begin, begin + count)} | set(loaded):
                assert table[index] not in self.readable(), "written while others read it"
        for load in sent.metadata.loads:
            assert not set(load.lost) & self.readable()
        self.steps.append(Step(sent, writes))

    # -- the rank

    def run(self) -> None:
        """The oldest step is computed, and its output arrives."""
        step = self.steps.popleft()
        metadata = step.sent.metadata
        report = RankReport(step=metadata.step, weights_changed=self.changed)
        self.changed = False
        if metadata.describe:
            report.weights_changed, self.described = False, self.weights
            report.descriptions, report.describes = {0: description()}, metadata.describe
            self.epoch = 0
        table = self.side.cache.table
        if metadata.open_epoch and self.described is not None:
            self.epoch = metadata.open_epoch
            if table is not None and table.epoch == self.epoch:
                set_life(table)
        for load in metadata.loads:
            request = self.e.scheduler.requests[load.load_id]
            self.imports.append(Import(load, request, self.epoch))
        invalid = set().union(*(self.compute(written) for written in step.writes))
        invalid |= self.finish(report)
        self.answer(step, report, invalid)
        if metadata.describe and metadata.describe == self.side._resets:
            self.e.wait_for_epoch()
            self.e.table.end_life(0)  # until the rank opens it
            self.weights_of[self.e.table.epoch] = self.weights

    def compute(self, written: Written) -> set[int]:
        bad = self.fill(written.request, written.table, written.loaded, FOREIGN)
        tokens = list(written.request._all_token_ids)
        for p in range(written.begin, written.begin + written.count):
            before = self.at(written.table, p - 1) if p else 0
            token = tokens[p] if p < len(tokens) else GARBAGE
            place = self.memory[written.table[p // BLOCK_SIZE]]
            place[p % BLOCK_SIZE] = kv_of(self.weights, before, token)
        return bad

    def fill(self, request: Request, table: list[int], loaded: range, weights: int) -> set[int]:
        """Blocks arrive from elsewhere, some of them sometimes not; returns those."""
        kv = contents(weights, list(request._all_token_ids)[: loaded.stop * BLOCK_SIZE])
        bad = set()
        for index in loaded:
            if self.rnd.random() < 0.2:
                bad.add(table[index])
                self.memory[table[index]] = [GARBAGE] * BLOCK_SIZE
            else:
                self.memory[table[index]] = kv[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        return bad

    def at(self, table: list[int], position: int) -> int:
        return self.memory[table[position // BLOCK_SIZE]][position % BLOCK_SIZE]

    def end_loads(self) -> None:
        """Some loads end: good while their epoch lasts."""
        for one in [i for i in self.imports if i.bad is None and self.rnd.random() < 0.5]:
            targets = one.load.lost
            one.bad = set(targets)
            if one.epoch and one.epoch == self.epoch:
                table = self.e.blocks_of(one.request.request_id)
                first = table.index(targets[0])
                arrived = range(first, first + len(targets))
                one.bad = self.fill(one.request, table, arrived, self.weights_of[one.epoch])
            # The load was planned as lost; what counts from here on is the rank's report.
            object.__setattr__(one.load, "lost", ())

    def finish(self, report: RankReport) -> set[int]:
        """Report the loads that have ended."""
        self.end_loads()
        ended = {one.load.load_id: one.bad for one in self.imports if one.bad is not None}
        self.imports = [one for one in self.imports if one.bad is None]
        report.loads += [LoadReport(name, tuple(bad)) for name, bad in ended.items()]
        return set().union(*ended.values())

    def answer(self, step: Step, report: RankReport, invalid: set[int]) -> None:
        names = [written.request.request_id for written in step.writes]
        sampled = [[self.rnd.randint(1, 3)] if w.samples else [] for w in step.writes]
        output = KVConnectorOutput(
            finished_recving={load.load_id for load in report.loads} or None,
            kv_connector_worker_meta=as_told(report),
            invalid_block_ids=invalid,
        )
        self.e.scheduler.update_from_output(
            step.sent.output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=output,
            ),
        )
        for written in step.writes:
            self.note(written.request)

    def note(self, request: Request) -> None:
        for index, block_hash in enumerate(request.block_hashes):
            if bytes(block_hash) not in self.tokens:
                tokens = list(request._all_token_ids)[: (index + 1) * BLOCK_SIZE]
                self.tokens[bytes(block_hash)] = tokens

    # -- what must hold at any moment

    def table(self) -> OwnSlotTable | None:
        """The table that others may read from at the moment."""
        table = self.side.cache.table
        alive = table is not None and not table.retired and table.life(0) == table.epoch
        return table if alive else None

    def readable(self) -> set[int]:
        table = self.table()
        slots = enumerate(table.slots()) if table else ()
        return {i for i, slot in slots if slot.state is SlotState.READY}

    def check(self) -> None:
        for block in self.readable():
            table = self.side.cache.table
            slot = table.slot(block)
            pure = contents(self.weights_of[table.epoch], self.tokens[bytes(slot.block_hash)])
            assert self.memory[block] == pure[-BLOCK_SIZE:], f"block {block} holds something else"
            self.seen += 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_others_may_read_is_what_it_says(
    engine: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, seed: int
) -> None:
    e = engine(asynchronous=asynchronous, num_blocks=24, max_num_batched_tokens=80, max_num_seqs=8)
    node = Node(e, random.Random(seed))
    monkeypatch.setattr(e.connector, "get_num_new_matched_tokens", node.found)
    monkeypatch.setattr(e.connector, "update_state_after_alloc", node.allocated)
    for _ in range(600):
        kind = node.rnd.random()
        if kind < 0.12:
            node.add()
        elif kind < 0.14:
            node.abort()
        elif kind < 0.15:
            node.new_weights()
        elif kind < 0.16:
            node.reset()
        elif len(node.steps) > asynchronous or (node.steps and kind < 0.5):
            node.run()
        else:
            node.schedule()
        node.check()
    assert node.seen > 100
