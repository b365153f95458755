"""Requests of LoRA adapters are shared by the adapter's contents, on real engines: equal ones,
whatever they are called and wherever they lie; others never, also where one takes the place of
another at run time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from completions import Result
from local_node import Engine
from sharing_node import BLOCK_SIZE, observe

from .adapter_files import write_adapter
from .conftest import Pair
from .engines import SharedNode
from .oracle import Prompt, random_prompt, shareable
from .test_families import servers, tell

__all__ = ["servers"]

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(900)]

ALONE = {"kv_transfer_params": {"kvshm": {"share": False}}}
LENGTH = 4 * BLOCK_SIZE + 30


class Shared(NamedTuple):
    node: SharedNode
    a: Engine
    b: Engine

    def load(self, engine: Engine, name: str, number: int, path: Path, **more: Any) -> Any:
        """Load an adapter, as vLLM's server does; returns how to ask for it."""
        adapter = {"lora_name": name, "lora_int_id": number, "lora_path": str(path)}
        tell(engine, "/load", **adapter, **more)
        return {"adapter": adapter}

    def share(self, prompt: Prompt, **asked: Any) -> Result:
        with self.node.sharing(self.a, shareable(prompt)):
            return self.a.complete(prompt, **asked)

    def imports(self, blocks: int, prompt: Prompt, **asked: Any) -> Result:
        """Have ``b`` import so many blocks of a prompt, and hit none of its own."""
        with observe(self.node, self.b) as seen:
            answer = self.b.complete(prompt, **asked)
        assert (seen.tokens.local_hit, seen.tokens.imported) == (0, blocks * BLOCK_SIZE)
        assert seen.mismatched == 0
        return answer

    def hits(self, blocks: int, prompt: Prompt, **asked: Any) -> Result:
        """Have ``a`` hit so many blocks in its own cache, and import none."""
        with observe(self.node, self.a) as seen:
            answer = self.a.complete(prompt, **asked, **ALONE)
        assert (seen.tokens.local_hit, seen.tokens.imported) == (blocks * BLOCK_SIZE, 0)
        return answer


@pytest.fixture(scope="module")
def shared(servers: Pair, model: Path) -> Iterator[Shared]:
    node, *engines = servers
    arguments = {"model": str(model), "num_gpu_blocks_override": 256, "enable_lora": True}
    arguments |= {"max_lora_rank": 16, "max_loras": 2}
    begin = {"arguments": arguments, "environment": {}}
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda engine: tell(engine, "/begin", **begin), engines))
    assert all(cache["shares"] for cache in made)
    node.wait_joined(*engines)
    yield Shared(*servers)
    for engine in engines:
        tell(engine, "/end")


def test_equal_contents_are_imported_whatever_they_are_called(
    shared: Shared, tmp_path: Path
) -> None:
    here = shared.load(shared.a, "here", 1, write_adapter(tmp_path / "here", 1))
    there = shared.load(shared.b, "there", 7, write_adapter(tmp_path / "there", 1))
    prompt = random_prompt(9000, LENGTH)
    shared.share(prompt, **here)
    imported = shared.imports(4, prompt, **there)
    assert imported == shared.hits(4, prompt, **here)
    plain = shared.share(prompt)
    assert imported.tokens != plain.tokens, "the adapter does nothing"
    assert shared.imports(4, prompt) == shared.hits(4, prompt)  # without an adapter, as ever


def test_other_contents_of_the_same_name_and_path_are_never_imported(
    shared: Shared, tmp_path: Path
) -> None:
    """The name and the number, and the path, whose files have changed between the two loads."""
    here = shared.load(shared.a, "same", 2, write_adapter(tmp_path, 2))
    prompt = random_prompt(9100, LENGTH)
    shared.share(prompt, **here)
    there = shared.load(shared.b, "same", 2, write_adapter(tmp_path, 3))
    with observe(shared.node, shared.b) as seen:
        shared.b.complete(prompt, **there)
    assert (seen.tokens.local_hit, seen.tokens.imported) == (0, 0)


def test_an_adapter_that_takes_the_place_of_another_shares_with_its_like(
    shared: Shared, tmp_path: Path
) -> None:
    """In place and under a new number.  vLLM itself would go on with the blocks of before."""
    prompt = random_prompt(9200, LENGTH)
    old = shared.load(shared.b, "old", 31, write_adapter(tmp_path / "old", 4))
    new = shared.load(shared.b, "new", 32, write_adapter(tmp_path / "new", 5))
    here = shared.load(shared.a, "one", 3, write_adapter(tmp_path / "one", 4))
    first = shared.share(prompt, **here)
    shared.load(shared.a, "one", 3, write_adapter(tmp_path / "one", 5), load_inplace=True)
    second = shared.share(prompt, **here)
    assert first.tokens != second.tokens
    assert shared.imports(4, prompt, **new) == shared.hits(4, prompt, **here)
    imported = shared.imports(4, prompt, **old)
    again = shared.load(shared.a, "one", 4, write_adapter(tmp_path / "one", 4))
    assert imported == shared.hits(4, prompt, **again)
