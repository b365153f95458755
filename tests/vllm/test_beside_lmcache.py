"""LMCache's MP connector beside kvshm's, with LMCache's server and real engines: each is used for
what the other does not have, and answers stay those of a local hit.

LMCache is in the folder LMCACHE or, unless that is set, in `lmcache` of this environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from completions import Result
from lmcache_store import CONNECTOR, Store, lmcache_store
from local_node import Engine, EngineSpec, clean_environment, wait_until
from sharing_node import BLOCK_SIZE, observe

from .engines import PATIENCE_S, SharedNode
from .oracle import Prompt, random_prompt
from .scheduling import BLOCK_SIZE as SMALL
from .several_connectors import OURS

ROOT = Path(__file__).parents[2]
LMCACHE = Path(os.environ.get("LMCACHE", Path(sys.prefix) / "lmcache"))
CHUNK = 2
"""Blocks in a chunk of LMCache's: of an odd number of blocks it has one less."""
BLOCKS, TAIL = 5, 30

pytestmark = [
    pytest.mark.vllm,
    # Of kvshm test_beside_others.py and test_combination.py show the same, without engines; LMCache
    # is the version of requirements/lmcache.txt, which a commit seldom changes.
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not LMCACHE.exists(), reason=f"{LMCACHE} does not exist: make setup"),
]


class Both(NamedTuple):
    """Engines that share and have a store.  ``first`` lists LMCache's connector first, as kvshm was
    told to be beside it, and ``last`` last, in a MultiConnector written by hand."""

    node: SharedNode
    store: Store
    first: Engine
    last: Engine

    def other(self, engine: Engine) -> Engine:
        return self.last if engine is self.first else self.first

    def compute(self, engine: Engine, prompt: Prompt, known: int = 0) -> Result:
        """Have an engine compute a prompt, until the other engine and the store know it; returns
        the answer of a local hit.  ``known``: blocks that the store has already."""
        blocks, stored = len(prompt) // BLOCK_SIZE, self._stored()
        with self.node.sharing(engine, blocks):
            engine.complete(prompt)
        for _ in wait_until("LMCache has stored the prompt", PATIENCE_S):
            if self._stored() >= stored + (blocks - known) // CHUNK:
                break
        return engine.complete(prompt)

    def _stored(self) -> int:
        status = self.store.status()
        return status["total_object_count"] - status["staging_object_count"]

    def forget(self) -> None:
        """Empty the caches of both engines; the store keeps what it has."""
        for engine in (self.first, self.last):
            self.node.reset(engine)
        self.node.wait_joined(self.first, self.last)


@pytest.fixture(scope="module")
def both(model: Path) -> Iterator[Both]:
    with lmcache_store(LMCACHE, 1, CHUNK * BLOCK_SIZE) as store, SharedNode() as node:
        by_hand = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [OURS, store.connector]},
        }
        beside = {**store.environment, "KVSHM_BESIDE": "1"}
        node.start_coordinator()
        engines = node.start_engines(
            spec("first", model, 0, store.connector, beside),
            spec("last", model, 1, by_hand, store.environment),
        )
        node.wait_joined(*engines)
        yield Both(node, store, *engines)


def spec(
    name: str, model: Path, core: int, transfer: dict[str, Any], environment: Mapping[str, str]
) -> EngineSpec:
    arguments = ("--kv-transfer-config", json.dumps(transfer))
    return EngineSpec(name, model, core, 256, arguments, environment)


@pytest.fixture(params=["first", "last"])
def engine(both: Both, request: pytest.FixtureRequest) -> Engine:
    """LMCache is listed first, or last."""
    found: Engine = getattr(both, request.param)
    return found


def test_lmcaches_connector_is_combined(both: Both) -> None:
    assert any(f"beside {CONNECTOR}, in a Multi" in line for line in both.first.said("kvshm: "))
    for engine in (both.first, both.last):
        assert engine.said("kvshm: joined as ")
        assert not engine.said("not sharing")
        assert engine.said("Registering kv caches")  # LMCache's own line


def test_what_a_peer_has_is_imported(both: Both, engine: Engine) -> None:
    """LMCache has most of it, and gives back what it has locked for the request."""
    prompt = random_prompt(10 + (engine is both.first), BLOCKS * BLOCK_SIZE + TAIL)
    local_hit = both.compute(both.other(engine), prompt)
    with observe(both.node, engine) as seen:
        answer = engine.complete(prompt)
    seen.assert_imported(BLOCKS)
    assert answer == local_hit
    for _ in wait_until("LMCache's locks are gone", PATIENCE_S):
        if not both.store.status()["read_locked_count"]:
            break


def test_what_only_the_store_has_is_loaded_from_it(both: Both, engine: Engine) -> None:
    prompt = random_prompt(20 + (engine is both.first), 4 * BLOCK_SIZE + TAIL)
    local_hit = both.compute(engine, prompt)
    both.forget()
    with observe(both.node, engine) as seen:
        answer = engine.complete(prompt)
    assert seen.tokens.imported == 4 * BLOCK_SIZE
    assert seen.imported_blocks == 0
    assert answer == local_hit


@pytest.mark.parametrize(("name", "blocks"), [("first", 4), ("last", 2)])
def test_the_longer_prefix_is_loaded_with_kvshm_beside(both: Both, name: str, blocks: int) -> None:
    """A peer has two blocks, the store four.  By hand, without KVSHM_BESIDE, the order counts."""
    engine: Engine = getattr(both, name)
    prompt = random_prompt(30 + blocks, 4 * BLOCK_SIZE + TAIL)
    both.compute(both.other(engine), prompt[: 2 * BLOCK_SIZE + TAIL])
    local_hit = both.compute(engine, prompt, known=2)
    both.node.reset(engine)
    both.node.wait_joined(both.first, both.last)
    with observe(both.node, engine) as seen:
        answer = engine.complete(prompt)
    assert seen.tokens.imported == blocks * BLOCK_SIZE
    assert seen.imported_blocks == (0 if blocks == 4 else 2)
    assert answer.tokens == local_hit.tokens
    assert answer == local_hit or blocks == 2  # computed blocks may be rounded otherwise


def test_lmcache_stores_no_block_of_an_import_that_was_lost(both: Both, model: Path) -> None:
    """It remembers a request's blocks from the first time that it hears of them, and would store
    under this prompt what others have in them by then."""
    script = [sys.executable, "-m", "tests.vllm.lost_import", str(model)]
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "examples"), both.store.environment["PYTHONPATH"]]
    )
    with tempfile.TemporaryDirectory(prefix="kv-") as run_dir:
        settings = {
            "KVSHM_RUN_DIR": run_dir,
            "KVSHM_STRICT": "1",
            "KVSHM_MIN_PREFIX_TOKENS": "0",
            "KVSHM_JOIN_WAIT_MS": "0",
        }
        done = subprocess.run(
            [*script, json.dumps(both.store.connector)],
            env={**clean_environment(), **both.store.environment, **settings, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"blocks stored: {CHUNK * BLOCK_SIZE // SMALL}" in done.stdout
