"""One pair of engines of each kind, in every `make test`: imports are right to the bit, a wrong
copy would be noticed, a client's refusal is obeyed, and a death costs misses.  `make test-all`
shows the rest.

One of the two copies wrongly, without verification, so that its imports show that the oracle can
go red.  What it computes is right: what the other imports from it is what the oracle has to pass.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import reaper
from local_node import Engine, wait_until
from sharing_node import BLOCK_SIZE, observe

from kvshm.halves import Receipt

from ..engines_under_test import ENGINES
from .conftest import Pair
from .engines import PATIENCE_S, SharedNode
from .oracle import Prompt, ask_both, assert_bit_equal, prompts, random_prompt, shareable
from .test_oracle import SHIFT, assert_noticed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SOURCES = ("local", "peer", "computed")
TOTAL = "vllm:prompt_tokens_total{"
BLIND = {"KVSHM_FAULT": SHIFT, "KVSHM_VERIFY": "0"}


@pytest.fixture(scope="module", params=ENGINES)
def uneven(model: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The second engine copies wrongly and does not notice."""
    spec = ENGINES[request.param]
    with SharedNode() as node:
        node.start_coordinator()
        engines = node.start_engines(
            spec("sound", model, core=0),
            spec("blind", model, core=1, environment=BLIND),
        )
        node.wait_joined(*engines)
        yield Pair(node, *engines)


def test_whatever_ends_this_process_ends_all_of_an_engine(uneven: Pair) -> None:
    """The reaper knows processes by a mark in their environment, which a new name may overwrite."""
    for engine in (uneven.a, uneven.b):
        for pid in engine.processes():
            assert f"\0{reaper.MARK}=" in "\0" + Path(f"/proc/{pid}/environ").read_text()


def test_imports_equal_local_hits_bit_for_bit(uneven: Pair) -> None:
    node, importer, exporter = uneven
    sent = list(prompts(6, seed=800))
    blocks = sum(map(shareable, sent))
    with observe(node, importer) as seen:
        answers = ask_both(node, exporter, importer, sent)
    assert_bit_equal(answers)
    assert seen.imported_blocks == blocks
    assert seen.tokens.imported == seen.loaded["imported_tokens"] == blocks * BLOCK_SIZE
    assert len({a.imported.tokens for a in answers}) > len(answers) // 2, "the model is blind"


def test_the_oracle_notices_a_wrong_copy(uneven: Pair) -> None:
    assert_noticed(uneven, uneven.b, seed=810)


@pytest.mark.parametrize("uneven", ["vllm"], indirect=True)
def test_a_request_stays_out_by_what_its_client_says(uneven: Pair) -> None:
    node, sharing, other = uneven
    unshared, shared = random_prompt(302, 400), random_prompt(303, 400)
    before = node.shown(sharing)
    sharing.complete(unshared, kv_transfer_params={"kvshm": {"share": False}})
    with node.sharing(sharing, shareable(shared)):
        sharing.complete(shared)
    assert len(node.shown(sharing) - before) == shareable(shared)
    tokens = other.prompt_tokens()
    other.complete(shared, kv_transfer_params={"kvshm": {"share": False}})
    assert (other.prompt_tokens() - tokens).imported == 0


def answered(engine: Engine, prompt: Prompt, asked: dict[str, bool]) -> dict[str, Any] | None:
    """What kvshm says in an answer that is not streamed."""
    about = {"prompt": prompt, "max_tokens": 2, "kv_transfer_params": {"kvshm": asked}}
    request = Request(
        f"http://127.0.0.1:{engine.port}/v1/completions",
        json.dumps({"model": str(engine.spec.model), **about}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request) as answer:
        params: dict[str, Any] | None = json.load(answer)["kv_transfer_params"]
    return params and params["kvshm"]


@pytest.mark.parametrize("uneven", ["vllm"], indirect=True)
def test_an_answer_says_where_its_prompt_came_from(uneven: Pair) -> None:
    node, exporter, importer = uneven
    (prompt,) = prompts(1, seed=830)
    asked, shared = {"report": True}, shareable(prompt) * BLOCK_SIZE
    rest = len(prompt) - shared
    common = {"prompt_tokens": len(prompt), "peer_tokens": 0}
    with node.sharing(exporter, shareable(prompt)):
        reported = answered(exporter, prompt, asked)
    assert reported is not None
    assert Receipt.read(reported.pop("after")) is not None
    assert reported == {**common, "local_tokens": 0, "computed_tokens": len(prompt)}
    reported = answered(importer, prompt, asked)
    assert reported is not None
    assert reported.pop("after")
    with contextlib.closing(node.table(exporter)) as table:
        peers = {table.engine: shared}
    assert reported == {
        **common, "local_tokens": 0, "peer_tokens": shared, "computed_tokens": rest, "peers": peers
    }  # fmt: skip
    reported = answered(importer, prompt, asked)
    assert reported is not None
    assert reported.pop("after")
    assert reported == {**common, "local_tokens": shared, "computed_tokens": rest}
    assert answered(importer, prompt, {}) is None


@pytest.mark.parametrize("uneven", ["vllm"], indirect=True)
def test_each_prompt_token_has_counted_once_by_its_source(uneven: Pair) -> None:
    """All that these engines were asked so far: vLLM's own numbers are the same."""
    node, *engines = uneven
    for engine in engines:
        for _ in wait_until("vLLM has counted the last prompt", PATIENCE_S):
            seen, counted = engine.metrics(), node.counted(engine)
            ours = {source: counted[f"prompt_tokens_{source}"] for source in SOURCES}
            total = sum(value for name, value in seen.items() if TOTAL in name)
            if total == sum(ours.values()):
                break
        vllms = engine.prompt_tokens()
        assert ours == dict(
            zip(SOURCES, (vllms.local_hit, vllms.imported, vllms.computed), strict=True)
        )
        assert ours == {source: seen[shown_as(seen, source)] for source in SOURCES}
        assert all(ours.values())
        assert total > 10_000
        for _ in wait_until("vLLM has logged them", PATIENCE_S):
            if engine.said("KV Transfer metrics: kvshm prompt tokens="):
                break


def shown_as(seen: dict[str, float], source: str) -> str:
    """The name of kvshm's own metric on vLLM's page."""
    ours = (name for name in seen if name.startswith("vllm:kvshm_prompt_tokens_total{"))
    return next(name for name in ours if f'source="{source}"' in name)


def test_an_exporter_killed_leaves_nothing_but_misses(uneven: Pair) -> None:
    """The last test of this pair: afterwards there is one engine."""
    node, importer, exporter = uneven
    used, unused = prompts(2, seed=820)
    with node.sharing(exporter, shareable(used) + shareable(unused)):
        exporter.complete(used)
        computed = exporter.complete(unused)
    with observe(node, importer) as seen:
        imported = importer.complete(used)
    assert seen.imported_blocks == shareable(used)
    assert imported == exporter.complete(used)

    node.kill(exporter)
    with observe(node, importer) as seen:
        assert importer.complete(unused) == computed
    assert seen.tokens.computed == len(unused)
    with observe(node, importer) as seen:
        assert importer.complete(used) == imported
    assert seen.tokens.local_hit == shareable(used) * BLOCK_SIZE
