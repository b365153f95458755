"""Imports that their own step waits for: no token computed from a block that did not arrive is
ever delivered, shown to others, or hit by another request.

vLLM's real schedulers and the real connector run random work.  The model is played: a token's KV
follows from the token and the KV before it, read from where the block table says, and the next
token follows from the last KV.  As in the model runner, a step's tokens are those of the worker.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvshm._base.ids import NO_LEASE_BIT, Epoch, LoadId
from kvshm._engine.groups import Group, Groups
from kvshm._engine.load_plan import NO_TICKET, LoadOrder, LoadReport, Piece, Plan
from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import RECORD_BYTES, SlotState
from kvshm._shm.statistics import IMPORTED_BLOCKS, LOADS_DONE, LOADS_FAILED
from kvshm.hooks.vllm.messages import RankReport

from .leftovers import assert_nothing_left
from .played_model import GARBAGE, Kv, PlayedModel
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, as_told, plan_of, prompt
from .several_groups import KINDS

PEER: Any = SimpleNamespace(info=SimpleNamespace(epoch=77, ranks=[]), row=-1)


def next_token(kv: list[int]) -> int:
    """What follows a token with this KV, by group."""
    return 1 + abs(sum(kv)) % 50


@dataclass
class Computed:
    request: Request
    tables: list[list[int]]
    begin: int
    count: int
    anew: list[int] | None
    samples: bool


@dataclass
class Node:
    e: DrivenEngine
    rnd: random.Random
    failing: float = 0.6
    memory: dict[int, Kv] = field(default_factory=dict)
    steps: deque[tuple[Sent, list[Computed]]] = field(default_factory=deque)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    delivered: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    chains: dict[bytes, list[int]] = field(default_factory=dict)
    later: list[tuple[LoadOrder, Request]] = field(default_factory=list)
    awaited: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        self.side = self.e.connector._scheduler
        self.groups: Groups = self.side.importer.lookups.groups
        self.model = PlayedModel(self.groups.all)
        self.largest = max(group.block_size for group in self.groups.all)
        self.memory = {b: [GARBAGE] * self.largest for b in range(self.e.num_blocks)}
        self.side.importer.peers.attached[0] = frozenset({Epoch(PEER.info.epoch)})

    # -- a peer that holds all prompts

    def lookup(self, chain: list[bytes], start: int, stop: int) -> Plan | None:
        if self.rnd.random() < 0.3:
            return None
        stop = self.rnd.randint(start + 1, stop) // self.groups.step * self.groups.step
        if stop <= start:
            return None
        parts = tuple(self.groups.parts(start, stop))
        runs = (PlannedRun(PEER, bytes(RECORD_BYTES * sum(part.num_blocks for part in parts))),)
        return Plan(self.e.table.epoch, start, stop - start, parts, runs, 0.0)

    def begin_load(
        self, plan: Plan, load_id: LoadId, targets: tuple[int, ...], *, attached: bool
    ) -> LoadOrder:
        epoch, lost = self.e.table.epoch, ()
        if self.rnd.random() < 0.05:
            targets, lost = targets[:-1], targets[-1:]
        pieces = (Piece(Epoch(77), (), b"", b"", targets, 0),) if targets else ()
        return LoadOrder(load_id, epoch, NO_TICKET, NO_LEASE_BIT, pieces, lost)

    # -- work

    def add(self) -> None:
        name, start = f"r{len(self.prompts)}", self.rnd.choice((1, 1, 500, 1000, 1500, 2000))
        tokens = prompt(7, first=start)[: self.rnd.randint(3, 7 * BLOCK_SIZE)]
        if self.rnd.random() < 0.5:
            tokens += [self.rnd.randint(1, 3) for _ in range(self.rnd.randint(1, BLOCK_SIZE))]
        self.prompts[name], self.delivered[name] = tokens, []
        self.e.add(name, tokens, max_tokens=self.rnd.choice((1, 5, 30)))

    def abort(self) -> None:
        if names := list(self.e.scheduler.requests):
            self.e.scheduler.finish_requests(self.rnd.choice(names), RequestStatus.FINISHED_ABORTED)

    def loading(self) -> bool:
        """Whether an asynchronous load is under way, or about to be."""
        return bool(self.later) or any(sent.metadata.loads for sent, _ in self.steps)

    def schedule(self) -> None:
        sent = self.e.schedule()
        reported = {new.req_id for new in sent.output.scheduled_new_reqs}
        reported |= set(sent.output.scheduled_cached_reqs.resumed_req_ids)
        parts = []
        for name, count in sent.output.num_scheduled_tokens.items():
            request = self.e.scheduler.requests[name]
            anew = list(request._all_token_ids) if name in reported else None
            begin = request.num_computed_tokens - count
            samples = not request.is_prefill_chunk
            parts.append(Computed(request, self.e.tables_of(name), begin, count, anew, samples))
            self.note(request)
        self.steps.append((sent, parts))

    def run(self) -> None:
        sent, parts = self.steps.popleft()
        report = RankReport(step=sent.metadata.step)
        for load in sent.metadata.at_once:
            self.awaited += 1
            request_id = self.side.importer.running.by_id[load.load_id].request_id
            part = next(part for part in parts if part.request.request_id == request_id)
            bad = self.fill(load, part.request, part.tables)
            silent = self.rnd.random() < 0.1
            if not silent:
                report.loads.append(LoadReport(load.load_id, bad))
            self.failed += bool(bad) or silent
        for load in sent.metadata.loads:
            self.later.append((load, self.e.scheduler.requests[load.load_id]))
        sampled = [self.compute(part) for part in parts]
        finished = self.end_some(report)
        names = [part.request.request_id for part in parts]
        lost = [one for one in report.loads if one.load_id in finished and one.bad]
        is_single_full_attention = self.groups.is_single_full_attention
        output = KVConnectorOutput(
            finished_recving=finished or None,
            kv_connector_worker_meta=as_told(report),
            invalid_block_ids={b for one in lost for b in one.bad if is_single_full_attention},
            failed_recving={one.load_id for one in lost if not is_single_full_attention},
        )
        done = self.e.scheduler.update_from_output(
            sent.output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=output,
            ),
        )
        for one in itertools.chain.from_iterable(each.outputs for each in done.values()):
            self.deliver(one.request_id, one.new_token_ids)
        for part in parts:
            self.note(part.request)

    def fill(self, load: LoadOrder, request: Request, tables: list[list[int]]) -> tuple[int, ...]:
        bad, kv = list(load.lost), self.model.contents(0, list(request._all_token_ids))
        for target in (t for piece in load.pieces for t in piece.targets):
            group = next(g for g in self.groups.all if target in tables[g.number])
            begin = tables[group.number].index(target) * group.block_size
            place = self.memory[target]
            place[:] = [GARBAGE] * self.largest
            if self.rnd.random() < self.failing / 3:
                bad.append(target)
            else:
                arrived = kv[group.number][begin : begin + group.block_size]
                place[: group.block_size] = arrived
        return tuple(bad)

    def end_some(self, report: RankReport) -> set[LoadId]:
        finished = set()
        for load, request in list(self.later):
            if self.rnd.random() < 0.5:
                tables = self.e.tables_of(load.load_id)
                report.loads.append(LoadReport(load.load_id, self.fill(load, request, tables)))
                finished.add(load.load_id)
                self.later.remove((load, request))
        return finished

    def compute(self, part: Computed) -> list[int]:
        name = part.request.request_id
        if part.anew is not None:
            self.tokens[name] = part.anew
        tokens = self.tokens[name]
        kv = []
        for p in range(part.begin, part.begin + part.count):
            kv = self.model.token(0, p, tokens[p], lambda g, q: self.at(part, g, q))
            for group, number in zip(self.groups.all, kv, strict=True):
                block = part.tables[group.number][p // group.block_size]
                self.memory[block][p % group.block_size] = number
        if not part.samples:
            return []
        tokens.append(next_token(kv))
        return [tokens[-1]]

    def at(self, part: Computed, group: Group, position: int) -> int:
        block = part.tables[group.number][position // group.block_size]
        return self.memory[block][position % group.block_size]

    def answer_to(self, tokens: list[int], count: int) -> list[int]:
        """What the model answers when everything goes right."""
        tokens, begin = list(tokens), len(tokens)
        kv = self.model.contents(0, tokens)
        for _ in range(count):
            tokens.append(next_token([each[-1] for each in kv]))
            made = self.model.token(0, len(tokens) - 1, tokens[-1], lambda g, p: kv[g.number][p])
            for each, number in zip(kv, made, strict=True):
                each.append(number)
        return tokens[begin:]

    def note(self, request: Request) -> None:
        for index, block_hash in enumerate(request.block_hashes):
            tokens = list(request._all_token_ids)[: (index + 1) * BLOCK_SIZE]
            self.chains[bytes(block_hash)] = tokens

    # -- what must hold

    def deliver(self, name: str, tokens: list[int]) -> None:
        self.delivered[name] += tokens
        wanted = self.answer_to(self.prompts[name], len(self.delivered[name]))
        assert self.delivered[name] == wanted, name

    def check(self) -> None:
        for block in self.e.scheduler.kv_cache_manager.block_pool.blocks:
            if self.e.table.slot(block.block_id).state is SlotState.READY:
                slot = self.e.table.slot(block.block_id)
                tokens = self.chains[key := bytes(slot.block_hash)]
                pure = self.model.last_block(0, key, tokens, slot.group)
                assert self.memory[block.block_id][: len(pure)] == pure


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_token_comes_of_a_block_that_did_not_arrive(
    engine: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, seed: int
) -> None:
    e = engine(asynchronous=asynchronous, num_blocks=28, max_num_batched_tokens=72, max_num_seqs=8)
    work(Node(e, random.Random(seed)), monkeypatch)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_comes_of_a_block_of_any_group_that_did_not_arrive(
    engine: Make, monkeypatch: pytest.MonkeyPatch, kind: str, asynchronous: bool, seed: int
) -> None:
    specs, batch = KINDS[kind], (72, 32)[seed]
    num_blocks = 14 + 14 * len(specs)
    e = engine(asynchronous, num_blocks, specs, max_num_batched_tokens=batch, max_num_seqs=8)
    work(Node(e, random.Random(seed)), monkeypatch)


def work(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random work; in the end every request has all of its tokens, and nothing is left."""
    e, asynchronous = node.e, node.e.asynchronous
    monkeypatch.setattr(node.side.cache.planner, "has_peers", lambda: True)
    monkeypatch.setattr(node.side.cache.planner, "lookup", node.lookup)
    monkeypatch.setattr(node.side.cache.planner, "load", node.begin_load)
    monkeypatch.setattr(e.connector, "pool_reset", lambda: None)  # the weights stay, so may blocks
    for _ in range(800):
        kind = node.rnd.random()
        if kind < 0.12:
            node.add()
        elif kind < 0.14:
            node.abort()
        elif kind < 0.16 and not node.loading():
            e.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif len(node.steps) > asynchronous or (node.steps and kind < 0.5):
            node.run()
        else:
            node.schedule()
        node.check()
    while node.steps:
        node.run()
    for _ in range(300):
        node.schedule()
        node.run()
    assert_nothing_left(e)
    assert node.awaited > node.failed > 3
    assert sum(map(len, node.delivered.values())) > 100


def found(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer holds three blocks of whatever is asked for, and leases all of them."""
    plan = plan_of(node.e.table.epoch, 0, (PlannedRun(PEER, bytes(RECORD_BYTES * 3)),))
    piece = Piece(Epoch(77), (), b"", b"", (), 0)

    def begin_load(
        _: Plan, load_id: LoadId, targets: tuple[int, ...], *, attached: bool
    ) -> LoadOrder:
        pieces = (replace(piece, targets=targets),)
        return LoadOrder(load_id, node.e.table.epoch, NO_TICKET, NO_LEASE_BIT, pieces, ())

    monkeypatch.setattr(node.side.cache.planner, "has_peers", lambda: True)
    monkeypatch.setattr(node.side.cache.planner, "lookup", lambda *_: plan)
    monkeypatch.setattr(node.side.cache.planner, "load", begin_load)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_counts_only_if_every_rank_says_so(
    engine: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, ranks: int
) -> None:
    """And then at once: vLLM hears nothing of it, and the blocks have their hashes."""
    e = engine(asynchronous=asynchronous)
    node = Node(e, random.Random(1), failing=0.0)
    importer = node.side.importer
    monkeypatch.setattr(importer.running, "_num_ranks", ranks)
    importer.peers.attached[1] = importer.peers.attached[0]
    if ranks == 1:
        del importer.peers.attached[1]
    found(node, monkeypatch)
    node.prompts["r"], node.delivered["r"] = prompt(3), []
    request = e.add("r", prompt(3), max_tokens=9)
    node.schedule()
    sent = node.steps[0][0]
    assert sent.output.has_sync_kv_loads
    assert sent.output.num_scheduled_tokens == {"r": 3}
    blocks = e.scheduler.kv_cache_manager.block_pool.blocks
    table = e.blocks_of("r")[:3]
    assert [blocks[block].block_hash for block in table] == [None] * 3
    if asynchronous:
        node.schedule()
    monkeypatch.setattr(node.rnd, "random", lambda: 0.9)  # the one rank says that all is well
    node.run()
    assert request.num_preemptions == ranks - 1
    counted = [e.table.counters.read(each) for each in (IMPORTED_BLOCKS, LOADS_DONE, LOADS_FAILED)]
    assert counted == ([3, 1, 0] if ranks == 1 else [0, 0, 1])
    if ranks == 1:
        assert all(blocks[block].block_hash for block in table)
        assert set(table) <= e.ready()
    for _ in range(12):
        node.schedule()
        node.run()
    assert len(node.delivered["r"]) == 9


def test_a_load_shows_nothing_of_what_its_blocks_hold_by_then(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was preempted while the step that waits for the load was under way, and got the
    same blocks again, each for another part of its prompt."""
    e = engine(asynchronous=True)
    node = Node(e, random.Random(1), failing=0.0)
    found(node, monkeypatch)
    monkeypatch.setattr(e.connector, "pool_reset", lambda: None)  # the weights stay, so may blocks
    node.prompts["r"], node.delivered["r"] = prompt(3), []
    e.add("r", prompt(3), max_tokens=9)
    node.schedule()
    before = e.blocks_of("r")
    e.scheduler.reset_prefix_cache(reset_running_requests=True)
    monkeypatch.setattr(node.side.cache.planner, "has_peers", lambda: False)
    node.schedule()
    assert e.blocks_of("r") == before[::-1]
    monkeypatch.setattr(node.rnd, "random", lambda: 0.9)  # the rank says that all is well
    node.run()
    assert node.awaited == 1
    assert e.ready() == set()  # the step that writes them has not run
    node.run()
    assert e.ready() == set(e.blocks_of("r")[:3])
    node.check()


def test_a_load_that_fails_leaves_another_request_of_its_id_alone(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request it was for has been aborted, and its id given to another one."""
    e = engine(asynchronous=True)
    node = Node(e, random.Random(1), failing=0.0)
    found(node, monkeypatch)
    e.add("r", prompt(3), max_tokens=9)
    node.schedule()
    sent, _ = node.steps.popleft()
    (load,) = sent.metadata.at_once
    e.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    monkeypatch.setattr(node.side.cache.planner, "has_peers", lambda: False)
    other = e.add("r", prompt(2, first=500), max_tokens=9)
    node.schedule()
    report = RankReport(sent.metadata.step, loads=[LoadReport(load.load_id, load.targets)])
    e.answer(sent, KVConnectorOutput(kv_connector_worker_meta=report))
    assert (other.status, other.num_preemptions) == (RequestStatus.RUNNING, 0)
    assert not other.drop_stale_output
