"""Adapters by their contents: what a rank digests, what the scheduler learns, and which keys the
requests get, with vLLM's own adapters, schedulers and hashes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("vllm")

from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from kvshm.halves import Group, Groups, Plan
from kvshm.hooks.vllm.adapters import AdapterDigests, Adapters, ContentHasher
from kvshm.hooks.vllm.contents import Contents
from kvshm.hooks.vllm.identity import fields as fields_module
from kvshm.hooks.vllm.identity.fields import adapter_kernels
from kvshm.hooks.vllm.imports.lookups import Lookups
from kvshm.hooks.vllm.imports.request_import import RequestImport
from kvshm.hooks.vllm.messages import RankReport

from .adapter_files import SHAPES, write_adapter
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, plan_of, prompt, vllm_config

# -- a rank


class Manager:
    """Loads adapters as vLLM's does."""

    def __init__(self) -> None:
        self.listed: set[int] = set()

    def list_adapters(self) -> set[int]:
        return self.listed

    def _load_adapter(self, asked: LoRARequest) -> LoRAModel:
        self.listed.add(asked.lora_int_id)
        helper = PEFTHelper.from_local_dir(asked.lora_path, 8192)
        return LoRAModel.from_local_checkpoint(
            asked.lora_path, set(SHAPES), helper, lora_model_id=asked.lora_int_id, device="cpu"
        )

    def _apply_adapters(self, requests: set[LoRARequest]) -> None:
        for asked in requests:
            self._load_adapter(asked)


class Rank:
    """What a rank says of the adapters that it loads."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.manager = Manager()
        self.digests = AdapterDigests(3, self.said.append, lambda: self.said.append("changed"))
        self.digests.watch(self.manager)

    def load(self, path: Path, number: int = 1, in_step: bool = False) -> bytes:
        asked = LoRARequest("name", number, str(path), load_inplace=True)
        if in_step:
            self.manager._apply_adapters({asked})
        else:
            assert isinstance(self.manager._load_adapter(asked), LoRAModel)
        return self.said[-1][3][number]


def test_the_digest_is_of_what_was_loaded(tmp_path: Path) -> None:
    rank = Rank()
    one = rank.load(write_adapter(tmp_path / "one", 1))
    assert len(one) == 32
    assert rank.load(write_adapter(tmp_path / "again", 1), number=2) == one
    others = [
        rank.load(write_adapter(tmp_path / "2", 2), number=3),
        rank.load(write_adapter(tmp_path / "3", 1, lora_alpha=8), number=4),
        rank.load(write_adapter(tmp_path / "4", 1, use_rslora=True), number=5),
        rank.load(write_adapter(tmp_path / "5", 1, alpha_pattern={"q_proj": 4}), number=6),
    ]
    assert len({one, *others}) == 5
    assert "changed" not in rank.said
    assert rank.digests.known() == {3: {1: one, 2: one, **dict(enumerate(others, 3))}}


def test_another_adapter_that_no_call_has_announced_ends_the_epoch_before_it_is_told(
    tmp_path: Path,
) -> None:
    rank, path = Rank(), write_adapter(tmp_path, 1)
    rank.load(path, in_step=True)
    rank.load(path, in_step=True)
    write_adapter(tmp_path, 2)
    rank.load(path)
    assert "changed" not in rank.said
    write_adapter(tmp_path, 3)
    rank.load(path, in_step=True)
    assert rank.said[-2:] == ["changed", {3: rank.digests.known()[3]}]


def test_what_cannot_be_digested_has_an_empty_digest() -> None:
    rank = Rank()
    rank.digests._take(LoRARequest("name", 1, "path"), SimpleNamespace(id=1, loras={"x": object}))
    assert rank.said == [{3: {1: b""}}]


def test_the_loads_of_an_engine_are_watched_once() -> None:
    rank = Rank()
    watched = rank.manager._load_adapter
    rank.digests.watch(rank.manager)
    assert rank.manager._load_adapter is watched


def test_adapters_are_loaded_by_one_method_and_known_by_number() -> None:
    """vLLM's manager, over slots that are played.  A step loads what its requests need by
    ``_apply_adapters``, a call does not."""
    slots, read = set[int](), list[str]()
    manager = object.__new__(LRUCacheWorkerLoRAManager)
    manager._adapter_manager = MagicMock(
        list_adapters=lambda: slots,
        add_adapter=lambda adapter: slots.add(adapter.id),
        capacity=9,
        lora_slots=9,
        __len__=lambda _: len(slots),
    )
    manager._load_adapter = lambda asked: (  # type: ignore[method-assign]
        read.append(asked.lora_path) or SimpleNamespace(id=asked.lora_int_id)
    )
    for number, path, in_place in (
        (1, "a", False),
        (1, "b", False),
        (1, "c", True),
        (2, "d", False),
    ):
        manager.add_adapter(LoRARequest("name", number, path, load_inplace=in_place))
    assert read == ["a", "c", "d"]
    manager.set_active_adapters({LoRARequest("name", 3, "e")}, None)
    applied: list[Any] = []
    manager._apply_adapters = applied.append  # type: ignore[method-assign]  # vLLM's own calls it
    manager.set_active_adapters({LoRARequest("name", 4, "f")}, None)
    assert (read[3:], len(applied)) == (["e"], 1)


# -- what the scheduler knows


def test_an_adapter_is_known_when_all_ranks_have_told_of_it() -> None:
    def digest(*ranks: dict[int, dict[int, bytes]], kernels: str = "k") -> bytes | None:
        adapters = Adapters(2, kernels)
        for loaded in ranks:
            adapters.learn(loaded)
        return adapters._digests.get(1)

    assert digest() is None
    assert digest({0: {1: b"a"}}) is None
    assert digest({0: {1: b"a"}}, {1: {1: b""}}) is None
    known = digest({0: {1: b"a"}}, {1: {1: b"b"}})
    assert known is not None
    assert known == digest({1: {1: b"b"}, 0: {1: b"a"}})
    assert known != digest({0: {1: b"b"}}, {1: {1: b"a"}})
    assert known != digest({0: {1: b"a"}}, {1: {1: b"b"}}, kernels="other")


def test_how_adapters_are_computed_with_counts_for_their_requests_only(model: Path) -> None:
    def kernels(**more: Any) -> str:
        return adapter_kernels(vllm_config(model, enable_lora=True, **more).lora_config)

    assert kernels() == kernels(max_cpu_loras=7)
    assert kernels() != kernels(max_lora_rank=64)
    assert kernels() != kernels(max_loras=3)
    left_out = fields_module._LEFT_OUT["LoRAConfig"]
    config = vllm_config(model, enable_lora=True).lora_config
    assert left_out.keys() <= config.__dataclass_fields__.keys()


def test_an_adapter_that_is_gone_is_told_of_no_more(tmp_path: Path) -> None:
    rank = Rank()
    for number in (1, 2):
        rank.load(write_adapter(tmp_path / str(number), seed=number), number)
    assert rank.digests.known()[3].keys() == {1, 2}
    rank.manager.listed.remove(1)
    assert rank.digests.known()[3].keys() == {2}


def test_ranks_that_load_parts_of_an_adapter_do_not_share_it(model: Path) -> None:
    """Those of a mixture of experts: an engine knows nothing of what others load."""
    config = vllm_config(model, enable_lora=True)
    assert Contents(config, BLOCK_SIZE, trusts_ids=False).adapters is not None
    config.parallel_config.data_parallel_size = 2
    assert Contents(config, BLOCK_SIZE, trusts_ids=False).adapters is None


# -- requests


@pytest.fixture
def e(engine: Make) -> DrivenEngine:
    return engine(enable_lora=True, max_loras=2)


def load(e: DrivenEngine, number: int, contents: str, in_place: bool = False) -> LoRARequest:
    """Load an adapter by a call of the ranks; returns how to ask for it."""
    asked = LoRARequest(f"name {number}", number, contents, load_inplace=in_place)
    e.model_executor.collective_rpc("add_lora", args=(asked,))
    return LoRARequest(f"name {number}", number, "path")


def ask(
    e: DrivenEngine, name: str, adapter: LoRARequest | None, blocks: int = 2, **more: Any
) -> Any:
    return e.add(name, prompt(blocks), **{"max_tokens": 1, **more}, lora_request=adapter)


def steps(e: DrivenEngine, count: int = 3) -> None:
    for _ in range(count):
        e.step()


def test_equal_contents_have_equal_keys_and_others_other_ones(e: DrivenEngine) -> None:
    one, same, other = (load(e, n, text) for n, text in ((1, "a"), (2, "a"), (3, "b")))
    keys = [ask(e, str(i), lora).block_hashes for i, lora in enumerate((one, same, other, None))]
    assert keys[0] == keys[1]
    assert len({key for one in keys for key in one}) == 3 * 2
    steps(e, 6)
    assert len(e.ready()) == 3 * 2


def test_salts_count_beside_an_adapter(e: DrivenEngine) -> None:
    lora = load(e, 1, "a")
    assert ask(e, "a", lora).block_hashes != ask(e, "b", lora, cache_salt="s").block_hashes


def test_an_adapter_that_a_step_loads_is_shared_from_the_next_request_on(e: DrivenEngine) -> None:
    lora = LoRARequest("name", 1, "path")
    first = ask(e, "first", lora, max_tokens=3)
    sent = e.schedule()
    waiting = ask(e, "waiting", lora)
    e.run(sent, RankReport(sent.metadata.step, adapters={0: {1: b"a"}}))
    assert type(first._block_hasher) is not ContentHasher
    assert type(waiting._block_hasher) is ContentHasher
    assert not e.ready()
    steps(e)
    assert len(e.ready()) == 2
    assert not e.connector._scheduler.importer.may_share(first)


def test_what_a_request_may_load_at_any_step_is_not_shared(e: DrivenEngine) -> None:
    load(e, 1, "a")
    ask(e, "r", LoRARequest("name", 1, "path", load_inplace=True))
    steps(e, 2)
    assert not e.ready()


def test_a_request_whose_adapter_changes_goes_on_with_keys_of_its_own(e: DrivenEngine) -> None:
    lora = load(e, 1, "a")
    running = ask(e, "running", lora, max_tokens=3 * BLOCK_SIZE)
    steps(e, 2)
    before = list(running.block_hashes)
    assert len(e.ready()) == len(before) == 2
    load(e, 1, "b", in_place=True)
    steps(e, 2 * BLOCK_SIZE)
    assert len(running.block_hashes) == 4
    assert not {*running.block_hashes} & {*before}
    assert len(e.ready()) == 2
    # The first contents come again: what the request computed meanwhile is not hit.
    known = running.all_token_ids[: 4 * BLOCK_SIZE]
    load(e, 2, "a")
    again = e.add("again", [*known, 1], max_tokens=1, lora_request=LoRARequest("n", 2, "path"))
    e.step()
    assert again.block_hashes[:2] == before
    assert again.prefill_stats is None or again.prefill_stats.num_cached_tokens == 2 * BLOCK_SIZE


def test_a_block_that_is_begun_is_keyed_anew(e: DrivenEngine) -> None:
    """Its first tokens are of the contents before.  A prompt is hashed before it is computed."""
    lora = load(e, 1, "a")
    e.scheduler.max_num_scheduled_tokens = BLOCK_SIZE + 5
    running = ask(e, "running", lora, blocks=4)
    before = list(running.block_hashes)
    e.step()
    assert running.num_computed_tokens == BLOCK_SIZE + 5
    load(e, 1, "b", in_place=True)
    assert len(running.block_hashes) == 4
    assert not {*running.block_hashes} & {*before}


def test_a_request_that_is_preempted_after_its_adapter_changed_hits_and_leaves_nothing(
    e: DrivenEngine,
) -> None:
    """It computes its whole prompt with the new contents; the blocks of the old ones keep theirs,
    and go."""
    lora = load(e, 1, "a")
    running = ask(e, "running", lora, max_tokens=3 * BLOCK_SIZE)
    steps(e, 2)
    load(e, 1, "b", in_place=True)
    e.scheduler.running.remove(running)
    e.scheduler._preempt_request(running, 0.0)
    e.scheduler.kv_cache_manager.evict_blocks(set(range(e.num_blocks)))
    assert e.schedule().output.num_scheduled_tokens["running"] == running.num_tokens
    load(e, 2, "a")
    tokens = [*running.all_token_ids[: 2 * BLOCK_SIZE], 1]
    again = e.add("again", tokens, max_tokens=1, lora_request=LoRARequest("n", 2, "path"))
    assert e.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 0


def test_what_a_step_computed_with_contents_that_nobody_announced_is_hit_by_none(
    e: DrivenEngine,
) -> None:
    """vLLM had dropped the adapter and reads its files again within the step: they are others."""
    lora = load(e, 1, "a")
    load(e, 2, "a")
    running = ask(e, "running", lora, max_tokens=9)
    sent = e.schedule()
    tokens = [*running.all_token_ids, 1]
    e.run(sent, RankReport(sent.metadata.step, adapters={0: {1: b"other"}}))
    again = e.add("again", tokens, max_tokens=1, lora_request=LoRARequest("n", 2, "path"))
    assert e.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 0


def test_a_request_that_waits_when_its_adapter_changes_is_hashed_anew(e: DrivenEngine) -> None:
    lora = load(e, 1, "a")
    waiting = ask(e, "waiting", lora)
    chain = waiting.block_hashes
    load(e, 1, "b", in_place=True)
    assert waiting.block_hashes is chain
    assert chain == ask(e, "new", lora).block_hashes
    steps(e)
    assert e.ready()


def test_an_adapter_may_change_while_a_request_is_received(e: DrivenEngine) -> None:
    """vLLM's thread has hashed it, its scheduler has not got it yet."""
    lora = load(e, 1, "a")
    receive = e.preprocess_add_request

    def receive_late(request: Any) -> Any:
        received = receive(request)
        load(e, 1, "b", in_place=True)
        return received

    e.preprocess_add_request = receive_late  # type: ignore[method-assign]
    late = ask(e, "late", lora)
    del e.preprocess_add_request
    assert late.block_hashes == ask(e, "new", load(e, 2, "b")).block_hashes


@pytest.mark.parametrize("how", [{"args": (1,)}, {}], ids=["named", "by place"])
def test_a_removed_adapter_is_not_known(e: DrivenEngine, how: dict[str, Any]) -> None:
    one, other = load(e, 1, "a"), load(e, 2, "b")
    running = ask(e, "running", one, max_tokens=9)
    e.step()
    e.model_executor.collective_rpc("remove_lora", *(() if how else (None, (1,))), **how)
    may_share = e.connector._scheduler.importer.may_share
    assert not may_share(running)
    assert not may_share(ask(e, "a", one))
    assert may_share(ask(e, "b", other))


def test_a_call_that_some_ranks_could_not_follow_is_learned_from(e: DrivenEngine) -> None:
    lora = load(e, 1, "a")
    e.model_executor.fails = True
    with pytest.raises(OSError, match="could not"):
        load(e, 1, "b", in_place=True)
    assert not e.connector._scheduler.importer.may_share(ask(e, "r", lora))


def test_a_request_that_has_ended_is_forgotten(e: DrivenEngine) -> None:
    ask(e, "r", load(e, 1, "a"))
    steps(e, 2)
    assert not e.scheduler.requests
    assert not e.connector._scheduler.importer.contents.adapters._requests


def test_what_was_found_for_other_hashes_is_not_taken() -> None:
    """With several groups a plan is kept for a while; a waiting request may be hashed anew."""
    asked: list[list[bytes]] = []

    def lookup(hashes: list[bytes], *_: int) -> Plan:
        asked.append(list(hashes))
        return plan_of(1, 0, ())

    planner: Any = SimpleNamespace(lookup=lookup, common_prefix=0, is_current=lambda plan: True)
    lookups = Lookups(SimpleNamespace(planner=planner), BLOCK_SIZE, lambda: 0.0)
    lookups.groups = Groups([Group(0, BLOCK_SIZE), Group(1, BLOCK_SIZE, window=32)])
    request = SimpleNamespace(block_hashes=[b"1", b"2"])
    import_ = RequestImport(request)
    for _ in range(2):
        lookups.find(import_, 0, 2)
    request.block_hashes[:] = [b"3", b"4"]
    lookups.find(import_, 0, 2)
    assert asked == [[b"1", b"2"], [b"3", b"4"]]
