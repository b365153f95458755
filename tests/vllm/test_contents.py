"""Whatever others may read holds what its hash says, and is of the weights of its epoch.

vLLM's real schedulers and the real connector run random work; the model is played: a token's
KV is a number made of the weights, the token and the numbers before it, read in every KV cache
group from where its block table says.  So a block that was begun with other weights, hit before it
was computed, or reused too early gives other numbers, also in all that is computed from it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvshm._base.ids import NO_LEASE_BIT, Epoch
from kvshm._engine.groups import Group, Groups
from kvshm._engine.load_plan import NO_TICKET, LoadOrder, LoadReport, Piece
from kvshm._shm.layout import SlotState
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm.hooks.vllm.messages import RankReport

from ..unit.served import set_life
from .played_model import GARBAGE, Kv, PlayedModel
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, as_told, description, prompt
from .several_groups import ALL_KINDS

SEEDS = range(6)
FOREIGN = -2
"""Weights of another model, whose KV another connector brings."""
Place = tuple[Group, int]


@dataclass
class Written:
    request: Request
    tables: list[list[int]]
    begin: int
    count: int
    samples: bool
    loaded: list[Place]

    def block(self, place: Place) -> int:
        return self.tables[place[0].number][place[1]]

    def state_block(self, group: Group, tokens: int) -> int:
        """The block with the state behind so many tokens, at a step's begin or end."""
        return self.block((group, (tokens - 1) // group.block_size))

    @property
    def end(self) -> int:
        return self.begin + self.count

    def blocks_written(self, group: Group) -> set[int]:
        """The blocks of a group that the step computes."""
        if group.state:
            return {self.state_block(group, self.end), self.checkpoint(group)} - {0}
        indices = {p // group.block_size for p in range(self.begin, self.end)}
        return {self.block((group, index)) for index in indices}

    def checkpoint(self, group: Group) -> int:
        """The block for the state at the last boundary within the step, 0: none; where vLLM's
        worker looks for it."""
        index = -(-self.end // group.block_size) - 2
        within = index > (self.begin - 1) // group.block_size and not self.begin % group.block_size
        return self.block((group, index)) if within else 0


@dataclass
class Step:
    sent: Sent
    writes: list[Written]


@dataclass
class Import:
    """A load of kvshm's under way."""

    load: LoadOrder
    request: Request
    epoch: int
    places: dict[int, Place]
    bad: set[int] | None = None
    """Targets that did not arrive, once it has ended."""


@dataclass
class Node:
    """The engine, its one rank, and what lies in the rank's memory."""

    e: DrivenEngine
    rnd: random.Random
    weights: int = 0
    weights_of: dict[int, int] = field(default_factory=dict)
    described: int | None = 0
    changed: bool = False
    epoch: int = 0
    memory: dict[int, Kv] = field(default_factory=dict)
    tokens: dict[bytes, list[int]] = field(default_factory=dict)
    steps: deque[Step] = field(default_factory=deque)
    imports: list[Import] = field(default_factory=list)
    others: dict[str, range] = field(default_factory=dict)
    """Requests whose next step another connector loads for, and which of their hashes."""
    hashes: dict[str, range] = field(default_factory=dict)
    places: dict[str, dict[int, Place]] = field(default_factory=dict)
    """Which blocks the loads fill that the next step hands over."""
    added: int = 0
    seen: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.side = self.e.connector._scheduler
        self.groups: Groups = self.side.importer.lookups.groups
        self.model = PlayedModel(self.groups.all)
        self.largest = max(group.block_size for group in self.groups.all)
        self.memory = {b: [GARBAGE] * self.largest for b in range(self.e.num_blocks)}
        self.weights_of[self.e.table.epoch] = 0
        self.epoch = self.e.table.epoch

    # -- the connector's answers, as if there were peers and another connector

    def found(self, request: Request, local: int) -> tuple[int | None, bool]:
        step = self.groups.step * BLOCK_SIZE
        first, last = local // step, (request.num_tokens - 1) // step
        kind = self.rnd.random()
        self.others.pop(name := request.request_id, None)
        if not self.side.may_import():
            return 0, False
        import_ = self.side.importer.imports.get(name)
        lost_blocks = import_ is not None and not import_.may_import
        if first >= last or kind < 0.5 or lost_blocks:
            return 0, False
        count = self.rnd.randint(1, last - first)
        self.hashes[name] = range(local // BLOCK_SIZE, (first + count) * self.groups.step)
        if kind < 0.53:
            self.others[name] = self.hashes[name]
            return count * step, False
        if kind < 0.55 or not self.side.importer.may_share(request):
            return (None if kind < 0.55 else 0), False
        return count * step, True

    def allocated(self, request: Request, blocks: Any, num_external: int) -> None:
        name, importer = request.request_id, self.side.importer
        ours = name not in self.others
        tables = [[block.block_id for block in table] for table in blocks.blocks]
        importer.allocated(request, tables, num_external if ours else 0)
        if not (ours and num_external):
            return
        places = self.places[name] = {
            tables[group.number][index]: (group, index)
            for group, index in self.to_fill(self.hashes[name], tables)
        }
        load = importer.imports[name].load
        assert load.targets == tuple(places), "these blocks are the load's"
        # A load that brings something, although no peer has it.
        piece = Piece(Epoch(77), (), b"", b"", load.targets, 0)
        table = self.side.cache.table
        epoch = table.epoch if table is not None else Epoch(0)
        load.order = LoadOrder(name, epoch, NO_TICKET, NO_LEASE_BIT, (piece,), ())

    def to_fill(self, hashes: range, tables: list[list[int]]) -> list[Place]:
        """The blocks that vLLM has allocated for a load of so much."""
        return [
            (group, index)
            for group in self.groups.all
            for index in range(hashes.start // group.scale, hashes.stop // group.scale)
            if tables[group.number][index]
        ]

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
            assert begin >= before[name] or request.num_preemptions
            tables = self.e.tables_of(name)
            loaded = self.to_fill(self.others.pop(name, range(0)), tables)
            samples = not request.is_prefill_chunk
            writes.append(one := Written(request, tables, begin, count, samples, loaded))
            written = {one.block(place) for place in loaded}
            written = written.union(*map(one.blocks_written, self.groups.all))
            assert not written & self.readable(), "written while others read it"
        for load in sent.metadata.loads:
            assert not set(load.targets) & self.readable()
        self.steps.append(Step(sent, writes))

    # -- the rank

    def run(self) -> None:
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
            places = self.places.pop(load.load_id)
            self.imports.append(Import(load, request, self.epoch, places))
        invalid = set().union(*(self.compute(written) for written in step.writes))
        self.finish(report)
        self.answer(step, report, invalid)
        if metadata.describe and metadata.describe == self.side.epochs.descriptions.resets:
            self.e.wait_for_epoch()
            self.e.table.end_life(0)  # until the rank opens it
            self.weights_of[self.e.table.epoch] = self.weights

    def compute(self, written: Written) -> set[int]:
        places = {written.block(place): place for place in written.loaded}
        bad = self.fill(written.request, places, FOREIGN, failing=len(self.groups.all) == 1)
        tokens = list(written.request._all_token_ids)
        self.go_on(written)
        for p in range(written.begin, written.end):
            token = tokens[p] if p < len(tokens) else GARBAGE
            made = self.model.token(self.weights, p, token, lambda g, p: self.at(written, g, p))
            for group, number in zip(self.groups.all, made, strict=True):
                if group.state:
                    self.keep_state(written, group, p, number)
                    continue
                place = self.memory[written.block((group, p // group.block_size))]
                place[p % group.block_size] = number
        return bad

    def go_on(self, written: Written) -> None:
        """As vLLM's worker does first: copy each state to the block that the step writes."""
        for group in self.groups.all if written.begin else ():
            if group.state:
                source = written.state_block(group, written.begin)
                target = written.state_block(group, written.end)
                self.memory[target][0] = self.memory[source][0]

    def keep_state(self, written: Written, group: Group, position: int, state: int) -> None:
        self.memory[written.state_block(group, written.end)][0] = state
        last_block = (written.end - 1) // group.block_size
        if position + 1 == last_block * group.block_size and (block := written.checkpoint(group)):
            self.memory[block][0] = state

    def fill(
        self, request: Request, places: dict[int, Place], weights: int, failing: bool = True
    ) -> set[int]:
        """Blocks arrive from elsewhere, some of them sometimes not; returns those."""
        kv = self.model.contents(weights, list(request._all_token_ids)) if places else []
        bad = set()
        for block, (group, index) in places.items():
            begin, place = index * group.block_size, self.memory[block]
            place[:] = [GARBAGE] * self.largest
            if failing and self.rnd.random() < 0.2:
                bad.add(block)
            else:
                arrived = kv[group.number][begin : begin + group.block_size]
                if group.state:
                    arrived = arrived[-1:]
                place[: len(arrived)] = arrived
        return bad

    def at(self, written: Written, group: Group, position: int) -> int:
        if group.state:
            return self.memory[written.state_block(group, written.end)][0]
        block = written.block((group, position // group.block_size))
        return self.memory[block][position % group.block_size]

    def end_loads(self) -> None:
        """Some loads end: good while their epoch lasts."""
        for one in [i for i in self.imports if i.bad is None and self.rnd.random() < 0.5]:
            one.bad = set(one.places)
            if one.epoch and one.load.epoch == one.epoch == self.epoch:
                one.bad = self.fill(one.request, one.places, self.weights_of[one.epoch])

    def finish(self, report: RankReport) -> None:
        """Report the loads that have ended."""
        self.end_loads()
        ended = {one.load.load_id: one.bad for one in self.imports if one.bad is not None}
        self.imports = [one for one in self.imports if one.bad is None]
        report.loads += [LoadReport(name, tuple(bad)) for name, bad in ended.items()]

    def answer(self, step: Step, report: RankReport, invalid: set[int]) -> None:
        names = [written.request.request_id for written in step.writes]
        sampled = [[self.rnd.randint(1, 3)] if w.samples else [] for w in step.writes]
        failed = {load.load_id for load in report.loads if load.bad}
        if self.groups.is_single_full_attention:
            failed, invalid = set(), invalid.union(*(load.bad for load in report.loads))
        output = KVConnectorOutput(
            finished_recving={load.load_id for load in report.loads} or None,
            kv_connector_worker_meta=as_told(report),
            invalid_block_ids=invalid,
            failed_recving=failed,
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
            slot, weights = table.slot(block), self.weights_of[table.epoch]
            tokens = self.tokens[key := bytes(slot.block_hash)]
            pure = self.model.last_block(weights, key, tokens, slot.group)
            found = self.memory[block][: len(pure)]
            assert found == pure, f"block {block} holds something else"
            self.seen[slot.group] += 1


def work(node: Node) -> None:
    """Random work, after each bit of which all that others may read is checked."""
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
        elif len(node.steps) > node.e.asynchronous or (node.steps and kind < 0.5):
            node.run()
        else:
            node.schedule()
        node.check()


def made(e: DrivenEngine, monkeypatch: pytest.MonkeyPatch, seed: int) -> Node:
    node = Node(e, random.Random(seed))
    monkeypatch.setattr(e.connector, "get_num_new_matched_tokens", node.found)
    monkeypatch.setattr(e.connector, "update_state_after_alloc", node.allocated)
    return node


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_others_may_read_is_what_it_says(
    engine: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, seed: int
) -> None:
    e = engine(asynchronous=asynchronous, num_blocks=24, max_num_batched_tokens=80, max_num_seqs=8)
    node = made(e, monkeypatch, seed)
    work(node)
    assert node.seen[0] > 100


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_what_others_may_read_is_what_it_says_in_each_group(
    engine: Make, monkeypatch: pytest.MonkeyPatch, kind: str, asynchronous: bool, seed: int
) -> None:
    """A step computes more tokens than a window has, or fewer; vLLM keeps all windows, or, as by
    default, only those that a later prompt may need."""
    specs, batch = ALL_KINDS[kind], (80, 32)[seed]
    num_blocks = 16 + 12 * len(specs)
    e = engine(asynchronous, num_blocks, specs, max_num_batched_tokens=batch, max_num_seqs=8)
    e.scheduler.kv_cache_manager.coordinator.retention_interval = (None, 0)[seed]
    node = made(e, monkeypatch, seed)
    work(node)
    assert min(node.seen[group.number] for group in node.groups.all) > 50
