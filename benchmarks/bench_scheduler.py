"""What kvshm adds to vLLM's scheduler.

    PYTHONPATH=examples:. python benchmarks/bench_scheduler.py [--rounds 40]

Two of vLLM's own schedulers, one with kvshm and one without, take the same steps in turns: no
engine, no worker, no model (tests/vllm/scheduling.py plays the workers).  A step is schedule()
and update_from_output(); its time is that of this thread on a core.  ``hooks``: inside the
connector's methods, by the clock on the wall: asking for the thread's time takes a microsecond
out of cold caches, which would count for each of them.  ``added``: whatever the same step takes
longer, and that is also what vLLM itself does for a connector of any kind.  ``output``: in
``update_connector_output``, before the step's tokens go out.  ``longest_call``: in a step that
takes FREED blocks back from the pool, and whose request ends and frees as many.  The engine has no
peers; ``beside_peer``: one that has a copy of each of its blocks, so that it chooses among its free
blocks which go first (``blocks_wanted``), and all may.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["KVSHM_STRICT"] = "1"
os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # no model runs

from measurement import percentiles, report
from msgspec import structs
from tiny_model import write_model
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from kvshm._base.ids import BlockId, Rank
from kvshm._shm.layout import RECORD_BYTES
from kvshm.hooks.vllm.messages import RankReport
from tests.unit.served import ServedNode
from tests.vllm.scheduling import BLOCK_SIZE, DrivenEngine, as_told, vllm_config

PROMPT_TOKENS = 8000
FREED = 4096
"""Blocks of the prompts of which single calls are timed."""
IMPORT_RATIO = 0.1
"""What importing takes, of computing the same."""
REQUESTS = 256
NUM_DRAFTS = 3
DRAFTS = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 3}
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "blocks_wanted",
    "blocks_handed_out",
    "block_changes",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
)
WARM_UP = 20
"""Steps until blocks are reused, and memory was touched."""


class Played(DrivenEngine):
    """A scheduler, with kvshm or without, and what its steps cost."""

    def __init__(self, model: Path, shares: bool, num_blocks: int, **arguments: Any) -> None:
        settings = {"max_model_len": 8192, "max_num_batched_tokens": 8192, **arguments}
        config = vllm_config(model, **settings)
        config.scheduler_config.async_scheduling = False
        if not shares:
            config.kv_transfer_config = None
        self.drafts = "speculative_config" in arguments
        self.milliseconds: list[float] = []
        self.hooks_milliseconds: list[float] = []
        self.output_milliseconds: list[float] = []
        self._in_hooks = 0
        self._longest = 0, ""
        self.longest_calls: list[tuple[int, str]] = []
        """Of each step, in nanoseconds, with the hook's name."""
        super().__init__(config, num_blocks, shares=shares)
        for hook in HOOKS if shares else ():
            setattr(self.connector, hook, self._timed(getattr(self.connector, hook)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = time.perf_counter_ns()
            result = hook(*args)
            spent = time.perf_counter_ns() - begun
            self._in_hooks += spent
            self._longest = max(self._longest, (spent, hook.__name__))
            if hook.__name__ == "update_connector_output":
                self.output_milliseconds.append(spent / 1e6)
            return result

        return call

    def timed_step(self) -> None:
        self._in_hooks, self._longest = 0, (0, "")
        begun = time.thread_time_ns()
        output = self.scheduler.schedule()
        scheduled = time.thread_time_ns()
        answer = self._answer(output)
        answered = time.thread_time_ns()
        self.scheduler.update_from_output(output, answer)
        ended = time.thread_time_ns()
        self.milliseconds.append((scheduled - begun + ended - answered) / 1e6)
        self.hooks_milliseconds.append(self._in_hooks / 1e6)
        self.longest_calls.append(self._longest)
        if self.drafts:
            names = list(output.num_scheduled_tokens)
            drafts = [list(range(NUM_DRAFTS)) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _answer(self, output: Any) -> ModelRunnerOutput:
        """Each request samples a token, and has one draft accepted if it had any."""
        names = list(output.num_scheduled_tokens)
        drafted = output.scheduled_spec_decode_tokens
        tokens = [[5] * (1 + (name in drafted)) if self._samples(name) else [] for name in names]
        indices = {name: i for i, name in enumerate(names)}
        answer = ModelRunnerOutput(names, indices, tokens)
        if self.shares:
            metadata = output.kv_connector_metadata
            said = as_told(RankReport(metadata.step, metadata.fence))
            answer.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=said)
        return answer

    def step_aside(self) -> None:
        """The empty step after the last request, which nobody waits for."""
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, self._answer(output))
        self.output_milliseconds = self.output_milliseconds[: len(self.milliseconds)]

    def forget(self) -> None:
        self.milliseconds.clear()
        self.hooks_milliseconds.clear()
        self.longest_calls.clear()
        self.output_milliseconds.clear()


class Mirror:
    """Another engine, which has a copy of each block of this one."""

    def __init__(self, node: ServedNode, engine: Played) -> None:
        own = engine.connector._scheduler.cache.epoch_state
        self._own, self._peers, self._blocks = engine.table, own.peers, range(engine.num_blocks)
        info = structs.replace(own.info, epoch=own.info.epoch + 1, name="mirror", lease_bit=1)
        self._table = node.serve(
            info.name, info.epoch, info.num_blocks, fingerprint=info.fingerprint
        ).table
        node.enlist(self._table)
        self._table.set_life(Rank(0))
        self._peers.joined(info)
        assert self._peers.offer_blocks(), "the engine may not import from its peer"
        # By these steps, in which no model runs, nothing would be worth an import.
        costs = engine.connector._scheduler.cache.planner.costs
        costs.import_ratio, costs.least_blocks = lambda *_: IMPORT_RATIO, lambda *_: 1
        while engine.connector._scheduler.cache.lookups_are_early:  # requests would wait
            time.sleep(0.01)

    def copy(self) -> None:
        """Copy what the engine has, into blocks of the same numbers; the engine hears of it."""
        gone, _ = self._table.retract([BlockId(block) for block in self._blocks])
        records = self._own.scan()
        event = gone + self._table.publish(records, bytes(8 * (len(records) // RECORD_BYTES)))
        self._peers.apply_events([(self._table.epoch, event)])


def prefill(
    engines: list[Played],
    rounds: int,
    tokens: int = PROMPT_TOKENS,
    ended: Callable[[], None] = lambda: None,
) -> None:
    """One prompt a step; each step withdraws what the pool takes back and shows what is new.
    ``ended``: called behind each."""
    chance = random.Random(1)
    for index in range(WARM_UP + rounds):
        if index == WARM_UP:
            for engine in engines:
                engine.forget()
        prompt = [chance.randrange(1000) for _ in range(tokens)]
        for engine in engines[:: 1 if index % 2 else -1]:
            engine.add(f"r{index}", prompt, max_tokens=1)
            engine.timed_step()
            engine.step_aside()
        ended()


def decode(engines: list[Played], rounds: int) -> None:
    chance = random.Random(1)
    for index in range(REQUESTS):
        prompt = [chance.randrange(1000) for _ in range(500)]
        for engine in engines:
            engine.add(f"r{index}", prompt, max_tokens=4 * (rounds + 2 * WARM_UP))
    for index in range(WARM_UP + rounds):
        if index == WARM_UP:
            for engine in engines:
                engine.forget()
        for engine in engines[:: 1 if index % 2 else -1]:
            while any(r.num_output_tokens == 0 for r in engine.scheduler.requests.values()):
                engine.timed_step()  # prompts first
            engine.timed_step()


@contextmanager
def pair(model: Path, num_blocks: int, **arguments: Any) -> Iterator[list[Played]]:
    """An engine with kvshm and one without, of one configuration."""
    engines = [Played(model, shares, num_blocks, **arguments) for shares in (True, False)]
    try:
        yield engines
    finally:
        engines[0].close()


@contextmanager
def mirrored(engine: Played) -> Iterator[Mirror]:
    """A peer of this engine."""
    node = ServedNode(Path(os.environ["KVSHM_RUN_DIR"]), os.environ["KVSHM_NAMESPACE"])
    try:
        yield Mirror(node, engine)
    finally:
        node.close()


def result(engines: list[Played]) -> dict[str, Any]:
    ours, plain = (percentiles(engine.milliseconds) for engine in engines)
    added = [a - b for a, b in zip(*(e.milliseconds for e in engines), strict=True)]
    hooks = percentiles(engines[0].hooks_milliseconds)
    return {
        "plain_ms": plain,
        "with_kvshm_ms": ours,
        "added_ms": percentiles(added),
        "hooks_ms": hooks,
        "output_ms": percentiles(engines[0].output_milliseconds),
        "added_percent": round(100 * (ours["p50"] / plain["p50"] - 1), 1),
        "hooks_percent": round(100 * hooks["p50"] / plain["p50"], 1),
    }


def freed(engines: list[Played], blocks: int = FREED) -> dict[str, Any]:
    """The longest single call of each step."""
    calls = engines[0].longest_calls
    names = Counter(name for _, name in calls)
    return {
        "blocks": blocks,
        "longest_call_ms": percentiles([spent / 1e6 for spent, _ in calls]),
        "hook": names.most_common(1)[0][0],
        **result(engines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    directory = Path(tempfile.mkdtemp(prefix="kvb-"))
    os.environ["KVSHM_RUN_DIR"] = str(directory)
    os.environ["KVSHM_NAMESPACE"] = directory.name.lower().replace("_", "-")
    try:
        model = write_model(directory / "model")
        with pair(model, 6000, max_num_seqs=64) as engines:
            prefill(engines, rounds)
            first = result(engines)
        tokens = FREED * BLOCK_SIZE
        long = {"max_model_len": tokens + BLOCK_SIZE, "max_num_batched_tokens": tokens}
        with pair(model, FREED + 1000, max_num_seqs=8, **long) as engines:
            prefill(engines, rounds, tokens)
            at_once = freed(engines)
        beside_peer = {}
        for name, length, blocks, settings in (
            ("prefill", PROMPT_TOKENS, 6000, {"max_num_seqs": 64}),
            ("freed", tokens, FREED + 1000, {"max_num_seqs": 8, **long}),
        ):
            with pair(model, blocks, **settings) as engines, mirrored(engines[0]) as mirror:
                prefill(engines, rounds, length, ended=mirror.copy)
                beside_peer[name] = freed(engines, length // BLOCK_SIZE)
        many = REQUESTS * (500 + 8 * (rounds + 3 * WARM_UP)) // BLOCK_SIZE
        with pair(model, many, max_num_seqs=REQUESTS) as engines:
            decode(engines, rounds)
            plain = result(engines)
        with pair(model, many, max_num_seqs=REQUESTS, speculative_config=DRAFTS) as engines:
            decode(engines, rounds)
            drafts = result(engines)
    finally:
        shutil.rmtree(directory)
    report(
        "scheduler",
        prefill=first,
        decode=plain,
        decode_with_drafts=drafts,
        freed=at_once,
        beside_peer=beside_peer,
    )


if __name__ == "__main__":
    main()
