"""Where prompts' tokens came from, under vLLM's real schedulers: every token of every request that
was scheduled counts once, none that did not arrive counts as imported, and vLLM says the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request, RequestStatus

from kvshm._base.ids import NO_LEASE_BIT, Epoch
from kvshm._engine.load_plan import NO_TICKET, LoadOrder, LoadReport, Piece
from kvshm._shm.statistics import PROMPT_TOKENS_COMPUTED, PROMPT_TOKENS_LOCAL, PROMPT_TOKENS_PEER
from kvshm.hooks.vllm.imports.request_import import Load, RequestImport, Span, Stage
from kvshm.hooks.vllm.metrics import LoadStats

from . import test_at_once
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, described, prompt
from .several_groups import KINDS, PeerOf, Played, peer_of

assert peer_of  # a fixture

COUNTERS = (PROMPT_TOKENS_LOCAL, PROMPT_TOKENS_PEER, PROMPT_TOKENS_COMPUTED)
OWN = 55
REPORT = {"kvshm": {"report": True}}


def counted(e: DrivenEngine) -> tuple[int, ...]:
    """Local, from peers, computed: as the slot table says."""
    return tuple(map(e.table.counters.read, COUNTERS))


class Node(test_at_once.Node):
    """Random work in which every request asks where its tokens came from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scheduled: set[str] = set()
        self.awaited_first: set[str] = set()
        """Requests whose first step waits for a load and is still under way."""
        self.brought: dict[str, int] = {}
        """Tokens that a request's import has brought; not if it was at once and arrived."""
        self.by_vllm: dict[str, tuple[int, int, int]] = {}
        self.answers: dict[str, dict[str, int]] = {}
        self.preempted = 0
        self.stats = LoadStats()
        update = self.e.scheduler.update_from_output

        def heard(*args: Any) -> Any:
            done = update(*args)
            stats = [each.scheduler_stats for each in done.values() if each.scheduler_stats]
            for sums in (one.kv_connector_stats or {} for one in stats):
                self.stats.aggregate(LoadStats(sums))
            for output in (one for each in done.values() for one in each.outputs):
                if (stats := output.prefill_stats) is not None:
                    self.by_vllm[output.request_id] = (
                        stats.num_local_cached_tokens,
                        stats.num_external_cached_tokens,
                        stats.num_computed_tokens,
                    )
                if output.kv_transfer_params is not None:
                    self.answers[output.request_id] = output.kv_transfer_params["kvshm"]
            return done

        self.e.scheduler.update_from_output = heard
        finish = self.side.importer.running.finish_at_once

        def finish_at_once(*args: Any) -> list[RequestImport]:
            ended = finish(*args)
            failed = {import_.request_id for import_ in ended if not import_.load.good}
            self.brought.update(dict.fromkeys(failed & self.awaited_first, 0))
            return ended

        self.side.importer.running.finish_at_once = finish_at_once

    def add(self) -> None:
        super().add()
        newest = self.e.scheduler.requests[f"r{len(self.prompts) - 1}"]
        newest.kv_transfer_params = REPORT

    def schedule(self) -> None:
        super().schedule()
        sent = self.steps[-1][0]
        waiting = self.requests_of(sent)
        first = {new.req_id for new in sent.output.scheduled_new_reqs} - self.scheduled
        self.preempted += sum(r.num_preemptions for r in self.e.scheduler.requests.values())
        self.scheduled |= first
        self.awaited_first |= first & waiting
        for name in first & waiting:  # a reset has thrown away what it had before
            self.brought.pop(name, None)

    def run(self) -> None:
        waiting = self.requests_of(self.steps[0][0])
        super().run()
        self.awaited_first -= waiting

    def requests_of(self, sent: Sent) -> set[str]:
        """Whose loads the step waits for."""
        imports = self.side.importer.running.by_id
        return {imports[load.load_id].request_id for load in sent.metadata.at_once}

    def fill(self, load: LoadOrder, request: Request, tables: list[list[int]]) -> tuple[int, ...]:
        bad = super().fill(load, request, tables)
        if load.load_id == request.request_id and load.load_id not in self.scheduled:
            targets = load.targets + load.lost
            good = next((i for i, block in enumerate(targets) if block in bad), len(targets))
            if self.groups.is_single_full_attention:
                self.brought[request.request_id] = good * BLOCK_SIZE
        return bad

    def check(self) -> None:
        super().check()
        decided = self.scheduled - self.awaited_first
        assert sum(counted(self.e)) == sum(len(self.prompts[name]) for name in decided)

    def check_requests(self) -> None:
        """In the end, each request that had an answer."""
        assert self.answers.keys() <= self.by_vllm.keys()
        for name, answer in self.answers.items():
            local, peer, computed = self.by_vllm[name]
            assert answer == {
                "prompt_tokens": len(self.prompts[name]),
                "local_tokens": local,
                "peer_tokens": peer,
                "computed_tokens": computed,
            }
            assert peer <= self.brought.get(name, peer)


def work(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = node.side.importer.at_once  # half of the imports are asynchronous
    monkeypatch.setattr(at_once, "accepts", lambda *_: node.rnd.random() < 0.5)
    test_at_once.work(node, monkeypatch)
    node.check()
    node.check_requests()
    prompts = node.side.prompts
    assert (node.side.importer.imports, prompts._reports) == ({}, {})
    assert node.preempted
    assert all(counted(node.e))
    assert tuple(node.stats.data["prompt_tokens"].values()) == counted(node.e)
    assert len(node.answers) > 20


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_token_counts_once(
    engine: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, seed: int
) -> None:
    """Imports at once and asynchronous, whole, in part and failed; twins, chunks, preemptions,
    resets, and requests aborted at any time."""
    e = engine(asynchronous=asynchronous, num_blocks=28, max_num_batched_tokens=72, max_num_seqs=8)
    work(Node(e, random.Random(seed)), monkeypatch)


@pytest.mark.parametrize("kind", ["full and window", "larger full blocks"])
def test_every_token_counts_once_with_several_groups(
    engine: Make, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    e = engine(True, 42, KINDS[kind], max_num_batched_tokens=72, max_num_seqs=8)
    work(Node(e, random.Random(5)), monkeypatch)


# -- requests of each kind


def go_on(e: DrivenEngine, *names: str) -> None:
    """Step until these requests have ended."""
    while any(name in e.scheduler.requests for name in names):
        e.step()


def computed(e: DrivenEngine, name: str, tokens: list[int], **extra: Any) -> None:
    """A request comes and goes."""
    e.add(name, tokens, max_tokens=1, **extra)
    go_on(e, name)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"extra_args": {"kv_transfer_params": {"kvshm": {"share": False}}}},
        {"lora_request": LoRARequest("a", 1, "/nowhere")},
    ],
    ids=["shared", "not shared", "with an adapter"],
)
def test_a_local_hit_is_local_whoever_asks(engine: Make, extra: dict[str, Any]) -> None:
    e = engine()
    computed(e, "a", prompt(3), **extra)
    assert counted(e) == (0, 0, 3 * BLOCK_SIZE + 3)
    computed(e, "b", prompt(3, tail=5), **extra)
    assert counted(e) == (3 * BLOCK_SIZE, 0, 3 * BLOCK_SIZE + 3 + 5)


def test_the_last_token_of_a_full_hit_is_computed_with_its_block(engine: Make) -> None:
    e = engine()
    computed(e, "a", prompt(3, tail=0))
    computed(e, "b", prompt(3, tail=0))
    assert counted(e) == (2 * BLOCK_SIZE, 0, 4 * BLOCK_SIZE)


def test_prompt_logprobs_need_every_token_computed(engine: Make) -> None:
    e = engine()
    computed(e, "a", prompt(3))
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    request = Request("b", prompt(3), params, pooling_params=None, block_hasher=e.hasher)
    e.scheduler.add_request(request)
    go_on(e, "b")
    assert counted(e) == (0, 0, 2 * (3 * BLOCK_SIZE + 3))


def test_a_request_aborted_before_its_first_step_does_not_count(engine: Make) -> None:
    e = engine(max_num_seqs=1)
    e.add("runs", prompt(1))
    e.add("waits", prompt(2, first=700))
    e.step()
    e.scheduler.finish_requests("waits", RequestStatus.FINISHED_ABORTED)
    go_on(e, "runs")
    assert counted(e) == (0, 0, BLOCK_SIZE + 3)


def test_a_request_aborted_after_a_chunk_counts_whole(engine: Make) -> None:
    """vLLM counts none of it, because it has no output."""
    e = engine(max_num_batched_tokens=40, max_num_seqs=4)
    e.add("r", prompt(5))
    e.step()
    e.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert counted(e) == (0, 0, 5 * BLOCK_SIZE + 3)


def test_of_a_session_the_first_input_counts(engine: Make) -> None:
    """As in vLLM's numbers."""
    e = engine()
    e.add("s", prompt(2), max_tokens=1, resumable=True)
    e.step()
    e.continue_session("s", prompt(2, first=700), max_tokens=1)
    for _ in range(3):
        e.step()
    assert counted(e) == (0, 0, 2 * BLOCK_SIZE + 3)


def test_each_epoch_counts_its_own_requests(engine: Make) -> None:
    e = engine()
    computed(e, "a", prompt(3))
    before, seen = e.table, counted(e)
    assert e.scheduler.reset_prefix_cache()
    e.add("b", prompt(1))
    sent = e.schedule()
    e.run(sent, described(sent))
    e.wait_for_epoch()
    assert tuple(map(before.counters.read, COUNTERS)) == seen
    computed(e, "c", prompt(2))
    assert sum(counted(e)) == 2 * BLOCK_SIZE + 3


@pytest.mark.parametrize(
    ("source", "arrived", "wanted"),
    [
        (None, 80, (80, 0, 20)),  # another connector's, as far as anybody knows
        (None, 64, (64, 0, 36)),  # a part of its load has failed
        ([OWN], 80, (80, 0, 20)),  # copies within the cache, for other KV cache groups
        ([OWN, 77], 80, (32, 48, 20)),
        ([77], 48, (32, 16, 52)),
        ([77], 16, (16, 0, 84)),  # vLLM computes a part of the hit again
    ],
)
def test_only_what_a_peer_has_brought_is_a_peers(
    engine: Make, source: list[int] | None, arrived: int, wanted: tuple[int, ...]
) -> None:
    e = engine()
    side = e.connector._scheduler
    stats = PrefillStats()
    stats.set(100, 32, 48)
    request = SimpleNamespace(prefill_stats=stats, num_preemptions=0, kv_transfer_params=None)
    if source is not None:
        pieces = tuple(Piece(Epoch(each), (), b"", b"", (), 0) for each in source)
        load = LoadOrder("r", Epoch(OWN), NO_TICKET, NO_LEASE_BIT, pieces, ())
        ended = RequestImport(request, stage=Stage.ENDED)
        ended.load = Load(load, Span(0, 0, None), ())
        side.importer.imports["r"] = ended
    new = SimpleNamespace(req_id="r", num_computed_tokens=arrived)
    side.prompts.step_built([new], {"r": request})
    assert counted(e) == wanted
    request.num_preemptions = 1  # scheduled again
    side.prompts.step_built([new], {"r": request})
    assert counted(e) == wanted
    if source is not None:
        assert stats.num_computed_tokens == wanted[2]


# -- what an answer says


def answer_of(e: DrivenEngine, name: str) -> dict[str, Any] | None:
    """What vLLM gives to the client with the end of a request."""
    while name in e.scheduler.requests:
        sent = e.schedule()
        loads = [*sent.metadata.loads, *sent.metadata.at_once]
        Played(e).run(sent, *(LoadReport(load.load_id, load.lost) for load in loads))
    outputs = (one for each in e.outputs.values() for one in each.outputs)
    return next(one.kv_transfer_params for one in outputs if one.request_id == name)


@pytest.mark.parametrize("at_once", [False, True])
def test_an_answer_names_the_engines_it_is_from(
    engine: Make, peer_of: Callable[[DrivenEngine], PeerOf], at_once: bool
) -> None:
    e = engine()
    peer = peer_of(e)
    computed(e, "own", prompt(1, tail=2))
    peer.hold_all(prompt(4))
    if at_once:
        peer.attached()
    e.add("r", prompt(4), max_tokens=1, extra_args={"kv_transfer_params": REPORT})
    assert answer_of(e, "r") == {
        "kvshm": {
            "prompt_tokens": 4 * BLOCK_SIZE + 3,
            "local_tokens": BLOCK_SIZE,
            "peer_tokens": 3 * BLOCK_SIZE,
            "computed_tokens": 3,
            "peers": {"a": 3 * BLOCK_SIZE},
        }
    }


def test_only_requests_that_ask_are_reported(engine: Make) -> None:
    e = engine()
    e.add("r", prompt(1), max_tokens=1)
    assert answer_of(e, "r") is None
    unshared = {"kvshm": {"share": False, "report": True}}
    e.add("s", prompt(1), max_tokens=1, extra_args={"kv_transfer_params": unshared})
    answer = answer_of(e, "s")
    assert answer is not None
    assert answer["kvshm"] == {
        "prompt_tokens": BLOCK_SIZE + 3,
        "local_tokens": BLOCK_SIZE,
        "peer_tokens": 0,
        "computed_tokens": 3,
        "share": False,  # so that it holds where a router sends the answer
    }
    request = e.add("t", prompt(1), max_tokens=1, extra_args={"kv_transfer_params": answer})
    assert not e.connector._scheduler.importer.may_share(request)
    assert answer_of(e, "t") is None
