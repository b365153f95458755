"""Every family of models shares like one group of full attention: imports equal local hits bit for
bit, windows that have moved on included, and a wrong block of any group would be noticed.

Two servers go through all families, each with an engine of one family at a time.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from local_node import Engine, EngineSpec, wait_until
from sharing_node import Observation, observe

from .conftest import Pair
from .engines import PATIENCE_S, SharedNode
from .families import FULL, MADE_ONE_GROUP, SEVERAL_GROUPS, STATE, WINDOW, Family
from .oracle import Prompt, ask_both, assert_bit_equal, random_prompt

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class InTurnSpec(EngineSpec):
    """A server whose engines are made later (engines_in_turn.py)."""

    def command(self, port: int) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("engines_in_turn.py")), str(port)]


def tell(engine: Engine, path: str, **said: Any) -> dict[str, Any]:
    """Tell such a server something; returns what it answers."""
    url, body = f"http://127.0.0.1:{engine.port}{path}", json.dumps(said).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=300) as answer:
        found: dict[str, Any] = json.loads(answer.read() or b"{}")
    return found


class Shared(NamedTuple):
    """Two engines of one family that share."""

    family: Family
    node: SharedNode
    a: Engine
    b: Engine


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pytest.importorskip("vllm")
    nowhere, inside = tmp_path_factory.getbasetemp(), {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with SharedNode() as node:
        node.start_coordinator()
        engines = node.start_engines(
            InTurnSpec("one-in-turn", nowhere, core=0, environment=inside),
            InTurnSpec("other-in-turn", nowhere, core=1, environment=inside),
        )
        yield Pair(node, *engines)


def param(family: Family) -> Any:
    """Of what is nightly cheaper tests show the same: of one group of full attention
    test_oracle.py; of each mixture of groups, on a scheduler, test_contents.py."""
    marks = [pytest.mark.nightly] if family.nightly else []
    if "kv_cache_dtype" in family.arguments:
        narrow = not torch.cpu._is_avx512_supported()
        reason = "vLLM has no fp8 cache on a CPU without AVX-512"
        marks.append(pytest.mark.skipif(narrow, reason=reason))
    return pytest.param(family, id=family.name, marks=marks)


@contextmanager
def sharing_pair(servers: Pair, family: Family, model: Path, **more: Any) -> Iterator[Shared]:
    """Have the servers make engines of a family, with ``more`` arguments."""
    node, *engines = servers
    few = {"num_gpu_blocks_override": family.few_blocks}
    arguments = {"model": str(model), **few, **family.arguments, **more}
    begin = {"arguments": arguments, "environment": {**family.environment, "KVSHM_BESIDE": "1"}}
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda engine: tell(engine, "/begin", **begin), engines))
    try:
        for cache in made:
            assert tuple(map(tuple, cache["groups"])) == family.groups
            assert cache["shares"], f"kvshm has refused {family.name}"
        node.wait_joined(*engines)
        yield Shared(family, *servers)
    finally:
        for engine in engines:
            tell(engine, "/end")
        for _ in wait_until("nothing of the engines is left", PATIENCE_S):
            if not node.sockets():
                break


@pytest.fixture(scope="module", params=map(param, MADE_ONE_GROUP + SEVERAL_GROUPS))
def shared(
    request: pytest.FixtureRequest, servers: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    model = request.param.write(tmp_path_factory.mktemp("family"))
    with sharing_pair(servers, request.param, model) as pair:
        yield pair


def assert_imported(seen: Observation, family: Family, *sent: Prompt, local: int = 0) -> None:
    """The whole of what these prompts could hit was imported, but for what was there."""
    assert seen.tokens.local_hit == local
    assert seen.tokens.imported == sum(map(family.shareable, sent)) - local > 0
    assert seen.imported_blocks >= len(family.groups)
    if STATE in family.kinds:  # one of each group, and the attention
        states = len(sent) * [kind for kind, _ in family.groups].count(STATE)
        assert seen.imported_blocks == states + seen.tokens.imported // family.step
    assert seen.mismatched == 0


@contextmanager
def wrong(importer: Engine, group: int, kind: str) -> Iterator[None]:
    """The importer imports wrong blocks for a group (engines_in_turn.py)."""
    tell(importer, "/wrong", group=group, kind=kind)
    try:
        yield
    finally:
        tell(importer, "/wrong", group=None)


def long_prompts(count: int, seed: int) -> list[Prompt]:
    """Prompts of several windows and chunks, whose hits end at different places in them."""
    lengths = [700 + 331 * (i % 4) for i in range(count)]
    return [random_prompt(seed + i, tokens) for i, tokens in enumerate(lengths)]


def test_imports_equal_local_hits_bit_for_bit(shared: Shared) -> None:
    family, node, exporter, importer = shared
    sent = long_prompts(6, seed=9000)
    with observe(node, importer) as seen, observe(node, exporter) as exported:
        # One by one: the next one takes the blocks of this one.
        answers = [
            answer
            for prompt in sent
            for answer in ask_both(node, exporter, importer, [prompt], family.published)
        ]
    assert exported.retracted > 0
    assert_bit_equal(answers)
    assert_imported(seen, family, *sent)
    assert seen.verified == seen.imported_blocks
    assert len({a.imported.tokens for a in answers}) == len(sent), "the model is blind"


def test_a_local_hit_is_continued(shared: Shared) -> None:
    """The importer has the begin of the prompt, and imports what each group needs beyond.  vLLM
    keeps a window only at the end of each prompt, so the exporter is asked for both prompts."""
    family, node, importer, exporter = shared
    *_, prompt = long_prompts(4, seed=9200)
    part = prompt[: max(256, family.step) + 50]
    with node.sharing(exporter, 2 * family.published(prompt)):
        exporter.complete(part)
        exporter.complete(prompt)
    with observe(node, importer) as seen:
        assert importer.complete(part) == exporter.complete(part)
    assert_imported(seen, family, part)
    with observe(node, importer) as seen:
        imported = importer.complete(prompt)
    assert_imported(seen, family, prompt, local=family.shareable(part))
    assert imported == exporter.complete(prompt)


def test_a_common_begin_of_prompts_is_shared(shared: Shared) -> None:
    """Two engines have each computed a prompt of the same begin.  With windows or states, the first
    one keeps none at the end of that begin, but the second one does, because it parts there from a
    prompt of a peer.  So a third prompt continues the first engine's own blocks of full attention,
    behind windows or states of the second one."""
    family, node, one, other = shared
    begin = random_prompt(9400, 4 * 256 // family.step * family.step)
    tail = max(300, family.step + 40)  # a state is kept in it, and none at the end of the begin
    first, second, third = (begin + random_prompt(9401 + i, tail) for i in range(3))
    for engine, prompt in ((one, first), (other, second)):
        with node.sharing(engine, family.published(prompt)):
            engine.complete(prompt)
    alone = {"kvshm": {"share": False}}
    with observe(node, other) as seen:
        local_hit = other.complete(third, kv_transfer_params=alone)
    kinds, kept_at_ends = family.kinds, family.kinds & {WINDOW, STATE}
    assert seen.tokens.local_hit == (0 if kinds == {WINDOW} else len(begin))
    with observe(node, one) as seen:
        continued = one.complete(third)
    mixed = kept_at_ends and FULL in kinds
    assert seen.tokens.imported == (len(begin) if mixed else 0)
    assert seen.tokens.local_hit == (0 if kept_at_ends else len(begin))
    assert continued == local_hit


def test_a_wrong_block_of_any_group_is_noticed(shared: Shared) -> None:
    family, node, exporter, importer = shared
    for group in range(len(family.groups)):
        prompt = random_prompt(
            9300 + group, 5 * family.unit + family.tail
        )  # no whole number of chunks
        with wrong(importer, group, "neighbours"), observe(node, importer) as seen:
            answers = ask_both(node, exporter, importer, [prompt], family.published)
        assert_imported(seen, family, prompt)
        with pytest.raises(AssertionError, match="1 of 1 imports differ"):
            assert_bit_equal(answers)


def test_a_right_block_in_a_wrong_place_is_noticed(shared: Shared) -> None:
    """A block of the same group from elsewhere in the prompt, or one of another group if there is
    one: its bytes are what the exporter shows, so nothing but the answer tells."""
    family, node, exporter, importer = shared
    kinds = ("position", "group") if len(family.groups) > 1 else ("position",)
    for kind, group in product(kinds, range(len(family.groups))):
        prompt = random_prompt(9600 + group + 50 * (kind == "group"), 5 * family.unit + family.tail)
        begin = prompt[: 3 * family.unit + 20]  # has a window or a state at its end, too
        with node.sharing(exporter, 2 * family.published(prompt)):
            exporter.complete(begin)
            exporter.complete(prompt)
        with wrong(importer, group, kind), observe(node, importer) as seen:
            imported = importer.complete(prompt)
        assert_imported(seen, family, prompt)
        assert seen.verified == seen.imported_blocks
        assert imported != exporter.complete(prompt)


HOST_MEMORY = {
    "kv_connector": "HostConnector",
    "kv_connector_module_path": "host_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
}
WINDOWS_AND_STATES = [f for f in SEVERAL_GROUPS if f.name in ("gemma3", "qwen3-next")]


@pytest.mark.nightly
@pytest.mark.parametrize("family", WINDOWS_AND_STATES, ids=lambda family: family.name)
def test_beside_host_memory_each_is_used_for_what_the_other_lacks(
    servers: Pair, family: Family, tmp_path: Path
) -> None:
    """Of what host memory has given back nothing is shown, and what was imported is kept in it."""
    model = family.write(tmp_path / "model")
    with sharing_pair(servers, family, model, kv_transfer_config=HOST_MEMORY) as (_, node, a, b):
        begin, prompt = random_prompt(9701, 2 * 384 + 30), random_prompt(9702, 4 * 384 + 30)
        with node.sharing(a, 2 * family.published(prompt)):
            a.complete(begin)
            a.complete(prompt)
        local_hit = a.complete(prompt)
        with observe(node, b) as seen:
            assert b.complete(prompt) == local_hit
        assert_imported(seen, family, prompt)
        for engine in (a, b):
            node.reset(engine)
        node.wait_joined(a, b)
        for engine in (a, b):
            with observe(node, engine) as seen:
                assert engine.complete(prompt) == local_hit
            assert (seen.tokens.imported, seen.imported_blocks) == (4 * 384, 0)
            assert not node.shown(engine)
        longer = begin[: 2 * 384] + random_prompt(9703, 384 + 50)
        with node.sharing(b, family.published(longer)):
            b.complete(longer)
        with observe(node, a) as seen:
            imported = a.complete(longer)
        assert_imported(seen, family, longer)
        assert imported == b.complete(longer)
