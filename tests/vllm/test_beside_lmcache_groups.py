"""LMCache's MP connector beside kvshm's on models with several KV cache groups, windows or states:
each is used for what the other does not have, and answers stay those of a local hit, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

pytest.importorskip("vllm")

from completions import Result
from lmcache_store import Store, lmcache_store
from local_node import Engine, EngineSpec, wait_until
from sharing_node import observe

from .engines import PATIENCE_S, SharedNode
from .families import SEVERAL_GROUPS, Family
from .oracle import Prompt, random_prompt
from .test_beside_lmcache import LMCACHE

CHUNK = 384
"""Tokens that LMCache keeps together: a block of the one model, three of the other."""
FAMILIES = [f for f in SEVERAL_GROUPS if f.name in ("gemma3", "qwen3-next")]
TAIL = 30

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not LMCACHE.exists(), reason=f"{LMCACHE} does not exist: make setup"),
]


class Both(NamedTuple):
    """Two engines of one model that share and have a store."""

    family: Family
    node: SharedNode
    store: Store
    a: Engine
    b: Engine

    def compute(self, engine: Engine, prompt: Prompt) -> Result:
        """Have an engine compute a prompt, until the other engine and the store know it; returns
        the answer of a local hit."""
        stored = self._stored()
        with self.node.sharing(engine, self.family.published(prompt)):
            engine.complete(prompt)
        for _ in wait_until("LMCache has stored the prompt", PATIENCE_S):
            if self._stored() >= stored + len(prompt) // CHUNK:
                break
        return engine.complete(prompt)

    def _stored(self) -> int:
        status = self.store.status()
        return status["total_object_count"] - status["staging_object_count"]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    family = request.param
    model = family.write(tmp_path_factory.mktemp("family"))
    with lmcache_store(LMCACHE, 1, CHUNK) as store, SharedNode() as node:
        node.start_coordinator()
        beside = {**store.environment, "KVSHM_BESIDE": "1"}
        blocks = 4 * family.few_blocks
        longest = EngineSpec.longest_prompt(2048)
        arguments = ("--kv-transfer-config", json.dumps(store.connector), *longest)
        engines = node.start_engines(
            EngineSpec("one-beside", model, 0, blocks, arguments, beside),
            EngineSpec("other-beside", model, 1, blocks, arguments, beside),
        )
        node.wait_joined(*engines)
        yield Both(family, node, store, *engines)


def test_what_a_peer_has_is_imported(both: Both) -> None:
    """The store has it, too, and gives back what it has locked for the request."""
    prompt = random_prompt(8000, 3 * CHUNK + TAIL)
    local_hit = both.compute(both.a, prompt)
    with observe(both.node, both.b) as seen:
        answer = both.b.complete(prompt)
    assert seen.tokens.imported == 3 * CHUNK
    assert seen.imported_blocks >= len(both.family.groups)
    assert answer == local_hit
    for _ in wait_until("LMCache's locks are gone", PATIENCE_S):
        if not both.store.status()["read_locked_count"]:
            break


def test_what_only_the_store_has_is_loaded_from_it_and_not_shown(both: Both) -> None:
    prompt = random_prompt(8001, 3 * CHUNK + TAIL)
    local_hit = both.compute(both.a, prompt)
    for engine in (both.a, both.b):
        both.node.reset(engine)
    both.node.wait_joined(both.a, both.b)
    with observe(both.node, both.a) as seen:
        answer = both.a.complete(prompt)
    assert seen.tokens.imported == 3 * CHUNK
    assert seen.imported_blocks == 0
    assert answer == local_hit
    assert not both.node.shown(both.a)
