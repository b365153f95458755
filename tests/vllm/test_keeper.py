"""A keeper beside real engines: what both have lost comes back bit-equal, also after both were
started again; and it may be stopped and killed while they import from it.

One story of two engines: each step begins where the one before has ended.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from completions import Result
from local_node import Engine, EngineSpec, clean_environment, wait_until
from sharing_node import BLOCK_SIZE, observe

from kvshm import Config, EngineView, Reader

from .engines import PATIENCE_S, TOOL, SharedNode
from .oracle import Prompt, prompts, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

FEW_BLOCKS = 20
"""Of each engine's cache: together fewer than those of all prompts."""
SHORT = EngineSpec.longest_prompt((FEW_BLOCKS - 1) * BLOCK_SIZE)


class Keeper:
    def __init__(self, node: SharedNode) -> None:
        self.node = node
        self.log = node.run_dir / "keeper.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*TOOL, "keeper", "--memory", "256M"],
                env={**clean_environment(), **node.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        node.on_start(self.process.pid)

    def views(self) -> Iterator[tuple[EngineView, int]]:
        """Its engines, and how many blocks each has published."""
        place = Config(run_dir=str(self.node.run_dir), namespace=self.node.namespace)
        with closing(Reader(place)) as reader:
            for view in reader.engines():
                if view.pid == self.process.pid:
                    yield view, sum(1 for _ in reader.list(view.epoch))

    def wait_for(self, blocks: int) -> None:
        for _ in wait_until(f"the keeper has {blocks} blocks", PATIENCE_S):
            if sum(count for _, count in self.views()) == blocks:
                break

    def end(self) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def node() -> Iterator[SharedNode]:
    with SharedNode() as node:
        node.start_coordinator()
        yield node


def test_a_keeper_gives_back_what_engines_have_lost(node: SharedNode, model: Path) -> None:
    engines = [EngineSpec(name, model, core, FEW_BLOCKS, SHORT) for core, name in enumerate("ab")]
    a, b = node.start_engines(*engines)
    keeper = Keeper(node)
    node.wait_joined(a, b)
    sent = list(prompts(12, seed=910))
    assert sum(map(shareable, sent)) > 2 * FEW_BLOCKS
    hits, computed = _computed_and_kept(node, a, keeper, sent)
    _both_have_lost_it(node, [a, b], sent, hits)
    _in_drain_nothing_is_imported(node, [a, b], sent)
    node.stop_engines(a, b)
    a, b = node.start_engines(
        *(
            replace(spec, environment={"KVSHM_TEST_SYNC_POINT": f"{place}:stop"})
            for spec, place in zip(engines, ("COPIED", "COPY_BEGINS"), strict=True)
        )
    )
    for _ in wait_until("both know what the keeper has", PATIENCE_S):
        if all(_known(node, engine) >= sum(map(shareable, sent)) for engine in (a, b)):
            break
    _the_first_request_imports_from_a_stopped_keeper(node, a, keeper, sent[0], hits)
    _a_keeper_is_killed_in_an_import(node, b, keeper, sent[1], hits, computed)
    again = Keeper(node)
    a.complete(next(prompts(1, seed=911)))
    again.wait_for(len(node.shown_hashes(a, b)))
    assert again.end() == 0
    node.stop_engines(a, b)
    assert node.end_coordinator() == 0
    assert {path.suffix for path in node.run_dir.iterdir()} == {".log"}


def _computed_and_kept(
    node: SharedNode, engine: Engine, keeper: Keeper, sent: list[Prompt]
) -> tuple[dict[Prompt, Result], dict[Prompt, Result]]:
    """What an engine answers from its own cache, and when it computes."""
    computed, hits, blocks = {}, {}, 0
    for prompt in sent:
        computed[prompt] = engine.complete(prompt)
        hits[prompt] = engine.complete(prompt)
        blocks += shareable(prompt)
        keeper.wait_for(blocks)
    (view,) = [view for view, _ in keeper.views()]
    assert view.keeps
    assert "/dev/shm/" not in Path(f"/proc/{keeper.process.pid}/maps").read_text()  # can leave none
    assert node.counted(engine)["drained"] == node.counted(engine)["forced"] == 0
    return hits, computed


def _both_have_lost_it(
    node: SharedNode, engines: list[Engine], sent: list[Prompt], hits: dict[Prompt, Result]
) -> None:
    """By turns, so that the other engine never has what is asked."""
    for number, prompt in enumerate(sent[:6]):
        engine = engines[number % 2]
        with observe(node, engine) as seen:
            answer = engine.complete(prompt)
        seen.assert_imported(shareable(prompt))
        assert answer == hits[prompt] == engine.complete(prompt)


def _in_drain_nothing_is_imported(
    node: SharedNode, engines: list[Engine], sent: list[Prompt]
) -> None:
    """They are about to be stopped, and nothing would be lost."""
    done = node.kvshm("drain", "--json", "--here")
    assert done.returncode == 0, done.stderr
    assert [each["end"] for each in json.loads(done.stdout)] == ["kept", "kept"]
    for engine in engines:
        with observe(node, engine) as seen:
            for prompt in sent[:6]:
                engine.complete(prompt)
        assert seen.imported_blocks == seen.tokens.imported == 0
        assert seen.miss_in_drain > 0


def _the_first_request_imports_from_a_stopped_keeper(
    node: SharedNode, engine: Engine, keeper: Keeper, prompt: Prompt, hits: dict[Prompt, Result]
) -> None:
    with observe(node, engine) as seen:
        answer = _interrupted(engine, prompt, lambda: keeper.process.send_signal(signal.SIGSTOP))
    keeper.process.send_signal(signal.SIGCONT)
    seen.assert_imported(shareable(prompt))
    assert answer == hits[prompt] == engine.complete(prompt)


def _a_keeper_is_killed_in_an_import(
    node: SharedNode,
    engine: Engine,
    keeper: Keeper,
    prompt: Prompt,
    hits: dict[Prompt, Result],
    computed: dict[Prompt, Result],
) -> None:
    def kill() -> None:
        keeper.process.kill()
        keeper.process.wait()

    with observe(node, engine) as seen:
        answer = _interrupted(engine, prompt, kill)
    assert answer in (hits[prompt], computed[prompt])
    assert seen.imported_blocks == seen.tokens.imported == 0
    assert seen.tokens.computed == len(prompt)


def _interrupted(engine: Engine, prompt: Prompt, happens: Callable[[], object]) -> Result:
    """The answer of an engine that stops itself in its first import, while something happens."""
    with ThreadPoolExecutor(1) as pool:
        pending: Future[Result] = pool.submit(engine.complete, prompt)
        try:
            for _ in wait_until("the importer stops", PATIENCE_S):
                if "T" in engine.processes().values():
                    break
            happens()
        finally:
            engine.signal(signal.SIGCONT)
        return pending.result()


def _known(node: SharedNode, engine: Engine) -> int:
    """How many blocks of others the engine knows."""
    with closing(node.replica(engine)) as replica:
        return sum(row.entries for row in replica.rows())
