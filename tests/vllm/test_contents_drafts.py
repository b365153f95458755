"""What others may read holds what its hash says, also where steps write tokens that do not stay.

vLLM's real schedulers and the real connector run random work: drafts that are rejected, sessions
that drop their stop token and go on, requests that are preempted or aborted while a step of
theirs is under way.  The model is played as in test_contents.py, but it keeps its own account of
every request, as a worker does, and writes what it computes: drafts included.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import SpeculativeConfig
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvshm._engine.groups import Group
from kvshm._shm.layout import SlotState
from kvshm.hooks.vllm.messages import RankReport

from .played_model import GARBAGE, Kv, PlayedModel
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, as_told, full, prompt, states

NUM_DRAFTS = 3
STOP = 2
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_max": 3,
}


@dataclass
class Account:
    """What the rank knows of a request."""

    tokens: list[int]
    computed: int
    drafts: list[int] = field(default_factory=list)
    column: int = -1
    """Where its states are in their tables; behind it those of drafts."""
    accepted: int = 1
    """Which of these is the present one, from 1 on."""


@dataclass
class Part:
    """A request's part of a step."""

    request: Request
    tables: list[list[int]]
    count: int
    num_drafts: int
    begins: Account | None
    """The account that the rank is given, if the request begins, resumes or goes on."""

    def block(self, group: Group, position: int) -> int:
        """The block of attention that has a token; 0: none has, because the token is a draft behind
        what fits."""
        table, index = self.tables[group.number], position // group.block_size
        return table[index] if index < len(table) else 0


@dataclass
class Rank:
    """The engine's one rank, and what lies in its memory."""

    e: DrivenEngine
    rnd: random.Random
    drafts: bool
    priorities: bool
    memory: dict[int, Kv] = field(default_factory=dict)
    tokens: dict[bytes, list[int]] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    steps: deque[tuple[Sent, list[Part]]] = field(default_factory=deque)
    drafting: set[int] = field(default_factory=set)
    """Blocks into which the drafter writes on, after the step's output was handed over."""
    added: int = 0
    seen: Counter[int] = field(default_factory=Counter)
    preempted: int = 0
    accepted: float = 0.6
    """How likely a draft is accepted."""
    says: list[int] = field(default_factory=list)
    """The next tokens; random ones follow."""

    def __post_init__(self) -> None:
        self.groups = self.e.connector._scheduler.importer.lookups.groups.all
        self.model = PlayedModel(self.groups)
        self.states = [group for group in self.groups if group.state]
        self.memory = {b: [GARBAGE] * BLOCK_SIZE for b in range(self.e.num_blocks)}

    # -- random work

    def add(self) -> None:
        first, length = self.rnd.choice((1, 1, 500)), self.rnd.randint(3, 5 * BLOCK_SIZE)
        tokens = prompt(6, first=first)[:length]
        tokens += [self.rnd.randint(1, 3) for _ in range(self.rnd.randint(0, BLOCK_SIZE))]
        extra: dict[str, Any] = {"resumable": self.rnd.random() < 0.3}
        if self.priorities:
            extra["priority"] = self.rnd.randint(0, 3)
        request = self.e.add(f"r{self.added}", tokens, max_tokens=self.rnd.randint(1, 60), **extra)
        if self.rnd.random() < 0.5:
            request.sampling_params.stop_token_ids = [STOP]
        self.note(request)
        self.added += 1

    def abort(self) -> None:
        if names := list(self.e.scheduler.requests):
            self.e.scheduler.finish_requests(self.rnd.choice(names), RequestStatus.FINISHED_ABORTED)

    def go_on(self) -> None:
        """The client of some session sends its next input, perhaps before it is asked to."""
        sessions = [r for r in self.e.scheduler.requests.values() if r.resumable]
        if sessions:
            session = self.rnd.choice(sessions)
            # Fewer than there were drafts, and this vLLM stops with an error.
            length = self.rnd.randint(NUM_DRAFTS + 1, BLOCK_SIZE)
            tokens = [self.rnd.randint(1, 3) for _ in range(length)]
            length = self.rnd.randint(1, 30)
            self.e.continue_session(session.request_id, tokens, max_tokens=length)
            session.sampling_params.stop_token_ids = [STOP]
            self.note(session)

    def schedule(self) -> None:
        sent = self.e.schedule()
        output = sent.output
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                begins[name] = computed
        parts = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.e.scheduler.requests[name]
            account = None
            if name in begins:
                account = Account(list(request._all_token_ids), begins[name])
            num_drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            parts.append(Part(request, self.e.tables_of(name), count, num_drafts, account))
        self.preempted += len(output.preempted_req_ids or ())
        self.steps.append((sent, parts))

    # -- the rank

    def run(self) -> None:
        sent, parts = self.steps.popleft()
        self.drafting.clear()
        answers = [self.compute(part) for part in parts]
        names = [part.request.request_id for part in parts]
        report = as_told(RankReport(sent.metadata.step, sent.metadata.fence))
        self.e.scheduler.update_from_output(
            sent.output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=answers,
                kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=report),
            ),
        )
        if self.drafts and not self.e.asynchronous:
            drafts = [self.accounts[name].drafts for name in names]
            self.e.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        for part in parts:
            self.note(part.request)

    def compute(self, part: Part) -> list[int]:
        """Write what the step computes of one request; returns the tokens it samples."""
        name = part.request.request_id
        if part.begins is not None:
            self.accounts[name] = part.begins
            part.begins.column = (part.begins.computed - 1) // BLOCK_SIZE
        account = self.accounts[name]
        # vLLM pads with drafts that do not exist.
        drafts = (account.drafts + [GARBAGE] * NUM_DRAFTS)[: part.num_drafts]
        tokens = account.tokens + drafts
        self.copy_on(account, part)
        present = {g.number: self.state(part, g, account.accepted - 1) for g in self.states}
        for p in range(account.computed, account.computed + part.count):
            token = tokens[p] if p < len(tokens) else GARBAGE
            made = self.model.token(
                0, p, token, lambda g, at: present[g.number] if g.state else self.at(part, g, at)
            )
            for group, number in zip(self.groups, made, strict=True):
                if group.state:
                    present[group.number] = number
                    self.keep_state(account, part, group, p, number)
                elif block := part.block(group, p):
                    self.write(block, p % BLOCK_SIZE, number)
                    if self.drafts:
                        self.drafting.add(block)
        if account.computed + part.count - part.num_drafts < len(account.tokens):
            account.computed += part.count  # a chunk of a prefill
            account.accepted = 1
            return []
        running = account.computed + part.count - part.num_drafts
        sampled = self.sample(account, part, drafts)
        self.keep_accepted(account, part, running)
        return sampled

    def write(self, block: int, place: int, number: int) -> None:
        assert block not in self.readable(), "written while others read it"
        self.memory[block][place] = number

    # What vLLM's worker does with states (v1/worker/mamba_utils.py): each draft has one of its own.

    def state(self, part: Part, group: Group, draft: int) -> int:
        column = self.accounts[part.request.request_id].column
        return self.memory[part.tables[group.number][column + draft]][0] if column >= 0 else GARBAGE

    def copy_states(self, part: Part, source: int, target: int) -> None:
        for group in self.states:
            table = part.tables[group.number]
            self.write(table[target], 0, self.memory[table[source]][0])

    def copy_on(self, account: Account, part: Part) -> None:
        """Copy each state to where the step writes."""
        column = -(-(account.computed + part.count) // BLOCK_SIZE) - 1
        if account.column not in (-1, column):
            self.copy_states(part, account.column + account.accepted - 1, column)
            account.accepted = 1
        account.column = column

    def keep_state(
        self, account: Account, part: Part, group: Group, position: int, number: int
    ) -> None:
        end, table = account.computed + part.count, part.tables[group.number]
        behind = position - (end - 1 - part.num_drafts)
        if behind >= 0:
            self.write(table[account.column + behind], 0, number)
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [end], [part.count], BLOCK_SIZE, BLOCK_SIZE, self.alignment, self.dropping, BLOCK_SIZE
        )
        if offset and position + 1 == account.computed + offset:
            self.write(table[column], 0, number)

    def keep_accepted(self, account: Account, part: Part, running: int) -> None:
        """Behind a step with drafts: copy the state at the last boundary to its place."""
        if not self.drafts:
            return
        boundary = account.computed // BLOCK_SIZE * BLOCK_SIZE
        if boundary < running:
            return
        source, target = account.column + boundary - running, boundary // BLOCK_SIZE - 1
        if target == account.column:
            account.accepted = 1
        if source != target:
            self.copy_states(part, source, target)

    @property
    def alignment(self) -> int | None:
        alignment: int | None = self.e.scheduler.mamba_prefill_checkpoint_alignment
        return alignment

    @property
    def dropping(self) -> bool:
        return bool(self.e.scheduler.use_eagle_block_drop)

    def sample(self, account: Account, part: Part, drafts: list[int]) -> list[int]:
        accepted: list[int] = []
        for draft in drafts:
            if draft == GARBAGE or self.rnd.random() > self.accepted:
                break
            accepted.append(draft)
        account.computed += part.count - part.num_drafts + len(accepted)
        account.accepted = 1 + len(accepted)
        sampled = [*accepted, self.says.pop(0) if self.says else self.rnd.randint(1, 3)]
        account.tokens += sampled
        account.drafts = [self.rnd.randint(1, 3) for _ in range(NUM_DRAFTS if self.drafts else 0)]
        return list(sampled)

    def at(self, part: Part, group: Group, position: int) -> int:
        return self.memory[part.block(group, position)][position % BLOCK_SIZE]

    def note(self, request: Request) -> None:
        for index, block_hash in enumerate(request.block_hashes):
            if bytes(block_hash) not in self.tokens:
                tokens = list(request._all_token_ids)[: (index + 1) * BLOCK_SIZE]
                self.tokens[bytes(block_hash)] = tokens

    # -- what must hold at any moment

    def readable(self) -> set[int]:
        return self.e.ready()

    def check(self) -> None:
        assert not self.drafting & self.readable(), "readable before the drafter is through"
        for block, slot in enumerate(self.e.table.slots()):
            if slot.state is SlotState.READY:
                key = bytes(slot.block_hash)
                pure = self.model.last_block(0, key, self.tokens[key], slot.group)
                found = self.memory[block][: len(pure)]
                assert found == pure, f"block {block}: something else"
                self.seen[slot.group] += 1


def work(rank: Rank, asynchronous: bool, sessions: bool = True) -> None:
    """Random work, after each bit of which all that others may read is checked."""
    for _ in range(500):
        kind = rank.rnd.random()
        if kind < 0.14:
            rank.add()
        elif kind < 0.16:
            rank.abort()
        elif kind < 0.21 and sessions:
            rank.go_on()
        elif len(rank.steps) > asynchronous or (rank.steps and kind < 0.5):
            rank.run()
        else:
            rank.schedule()
        rank.check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_others_may_read_is_of_tokens_that_stayed(
    engine: Make, asynchronous: bool, drafts: bool, policy: str, seed: int
) -> None:
    e = engine(
        asynchronous=asynchronous,
        num_blocks=24,
        max_num_batched_tokens=80,
        max_num_seqs=8,
        scheduling_policy=policy,
        # Several prompts are under way at a time: one that has blocks hashed in a schedule() may
        # be preempted in it, and then they are never computed.
        long_prefill_token_threshold=32,
        scheduler_reserve_full_isl=policy != "priority",
        **({"speculative_config": SPECULATION} if drafts else {}),
    )
    rank = Rank(e, random.Random(seed), drafts, policy == "priority")
    work(rank, asynchronous)
    assert rank.preempted
    assert rank.seen[0] > 100


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("layers", [False, True], ids=["ngram", "layers"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_states_that_others_may_read_are_of_tokens_that_stayed(
    engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
    layers: bool,
    checkpoints: int,
    seed: int,
) -> None:
    """With draft layers (EAGLE, MTP) vLLM keeps a checkpoint one block before its place."""
    monkeypatch.setattr(SpeculativeConfig, "use_eagle", lambda _: layers)
    e = engine(
        asynchronous,
        num_blocks=(24, 18)[seed],
        specs=[full(), states(checkpoints, drafts=NUM_DRAFTS)],
        drafting=0 if layers else None,
        max_num_batched_tokens=(80, 200)[seed],
        max_num_seqs=8,
        scheduling_policy="priority",
        scheduler_reserve_full_isl=False,
        speculative_config=SPECULATION,
    )
    e.scheduler.kv_cache_manager.coordinator.retention_interval = (None, 0)[seed]
    rank = Rank(e, random.Random(seed), True, True)
    work(rank, asynchronous, sessions=False)
    assert rank.preempted
    assert min(rank.seen[0], rank.seen[1]) > 50


def test_a_block_that_ended_with_drafts_is_not_shown_if_its_request_is_preempted_at_once(
    engine: Make,
) -> None:
    """Its drafts are rejected, vLLM gives it a hash for the token that comes in their place, and
    preempts its request in the same schedule(): that token is never computed."""
    e = engine(
        asynchronous=True,
        num_blocks=random.Random(42).choice((16, 20, 24)),
        max_num_batched_tokens=80,
        max_num_seqs=8,
        scheduling_policy="priority",
        long_prefill_token_threshold=32,
        scheduler_reserve_full_isl=False,
        speculative_config=SPECULATION,
    )
    rank = Rank(e, random.Random(42), True, True)
    work(rank, True, sessions=False)
    assert rank.preempted


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("accepted", [0.6, 1.0])
def test_blocks_that_end_with_accepted_drafts_are_shown(
    engine: Make, asynchronous: bool, accepted: float
) -> None:
    """All that the own cache has, as a later prompt hits it: no step but the one behind it knows
    that such a block is complete."""
    e = engine(asynchronous, num_blocks=64, speculative_config=SPECULATION)
    rank = Rank(e, random.Random(1), True, False, accepted=accepted)
    request = e.add("r", prompt(3), max_tokens=300)
    while not request.is_finished() or rank.steps:
        if request.is_finished() or len(rank.steps) > asynchronous:
            rank.run()
        else:
            rank.schedule()
        rank.note(request)
        rank.check()
    for _ in range(3):
        rank.schedule()
        rank.run()
    pool = e.scheduler.kv_cache_manager.block_pool
    cached = {block.block_id for block in pool.blocks if block.block_hash}
    assert len(cached) > 300 // BLOCK_SIZE
    assert rank.readable() == cached


@pytest.mark.parametrize("asynchronous", [False, True])
def test_states_of_a_session_hold_no_token_that_was_dropped(
    engine: Make, asynchronous: bool
) -> None:
    """The step behind a stop token is under way: it changes the state by that token, which vLLM
    drops from the session."""
    e = engine(asynchronous, num_blocks=40, specs=[full(), states()])
    rank = Rank(e, random.Random(1), False, False)
    session = e.add("s", prompt(3), max_tokens=60, resumable=True)
    session.sampling_params.stop_token_ids = [STOP]
    rank.note(session)
    rank.says = [1, 1, 1, STOP, *[3] * 90]
    for number in range(60):
        if number == 12:
            e.continue_session("s", [1] * 30, max_tokens=20)
            rank.note(e.scheduler.requests["s"])
        rank.schedule()
        if len(rank.steps) > asynchronous:
            rank.run()
        rank.check()
    assert session.num_output_tokens == 20
    assert rank.seen[1]
