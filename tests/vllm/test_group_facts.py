"""What kvshm relies on in vLLM's KV cache groups (docs/kv-cache-groups.md), and how it has vLLM
keep windows at the end of a begin that prompts of two engines have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import SpeculativeConfig

from kvshm._base.ids import Epoch
from kvshm._engine.groups import Part
from kvshm._engine.load_plan import LoadReport
from kvshm._shm.statistics import IMPORTED_BLOCKS, IMPORTED_TOKENS, MISS_QUARANTINED
from kvshm.hooks.vllm.identity.groups import groups_of

from .scheduling import (
    BLOCK_SIZE,
    DrivenEngine,
    Make,
    chunk,
    full,
    imagined_cache,
    latent_window,
    latents,
    prompt,
    states,
    window,
)
from .several_groups import PEER, Played
from .several_groups import peer_of as peer_of

WINDOW = 40
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
KINDS = {
    "window": [full(), window(WINDOW)],
    "a window of whole blocks": [window(2 * BLOCK_SIZE + 1)],
    "chunks": [full(), chunk(3 * BLOCK_SIZE)],
    "larger windowed blocks": [full(), window(100, 2)],
    "states": [full(), states()],
    "latents": [latent_window(WINDOW, 2), latents(4), latent_window(20)],
}


def with_sparse_windows(engine: Make, *specs: Any) -> DrivenEngine:
    e = engine(num_blocks=64, specs=specs)
    e.scheduler.kv_cache_manager.coordinator.retention_interval = 0
    return e


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_leaves_out_the_blocks_before_the_first_needed(engine: Make, kind: str) -> None:
    manager = engine(specs=KINDS[kind]).scheduler.kv_cache_manager
    groups: Any = groups_of(imagined_cache(32, KINDS[kind]), manager)
    managers = manager.coordinator.single_type_managers
    for length in range(0, 30, groups.step):
        skipped = [max(one.get_num_skipped_tokens(length * BLOCK_SIZE), 0) for one in managers]
        first = [tokens // one.block_size for tokens, one in zip(skipped, managers, strict=True)]
        assert [g.first_needed(length // g.scale) for g in groups.all] == first


@pytest.mark.parametrize("boundary", [0, 4])
def test_windows_are_kept_at_the_shared_prefix_boundary(engine: Make, boundary: int) -> None:
    """And at the end of the prompt; vLLM gives no other block of a window a hash."""
    e = with_sparse_windows(engine, full(), window(WINDOW))
    find = e.scheduler.kv_cache_manager.get_computed_blocks

    def found(*asked: Any) -> Any:
        return (*find(*asked)[:2], boundary * BLOCK_SIZE)

    e.scheduler.kv_cache_manager.get_computed_blocks = found
    e.add("a", prompt(10))
    e.schedule()
    assert hashed(e) == {7, 8, 9} | ({1, 2, 3} if boundary else set())


def hashed(e: DrivenEngine) -> set[int]:
    blocks = e.scheduler.kv_cache_manager.get_blocks("a").blocks[1]
    return {index for index, block in enumerate(blocks) if block.block_hash is not None}


@pytest.mark.parametrize("common", [0, 2, 6])
def test_windows_are_kept_where_a_prompt_parts_from_one_of_a_peer(
    engine: Make, peer_of: Any, common: int
) -> None:
    """The peer has no window there, so nothing is imported; the next prompt will find one."""
    e = with_sparse_windows(engine, full(), window(WINDOW))
    peer = peer_of(e)
    asked = prompt(10)
    theirs = asked[: common * BLOCK_SIZE] + prompt(10 - common, first=500)
    request = e.add("imagined", theirs, max_tokens=1)
    peer.hold(request, Part(0, 0, 10), Part(1, 7, 3))
    e.scheduler.finish_requests("imagined", request.status.FINISHED_ABORTED)
    e.add("a", asked)
    sent = e.schedule()
    assert not sent.metadata.loads
    assert hashed(e) == {7, 8, 9} | set(range(max(common - 3, 0), common))


def test_blocks_that_get_no_hash_are_not_waited_for(engine: Make) -> None:
    """vLLM gives most blocks of a window none, and a step with blocks that wait is not quiet."""
    e = with_sparse_windows(engine, full(), window(WINDOW))
    e.add("a", prompt(9), max_tokens=40)
    tracker = e.connector._scheduler.tracker
    for _ in range(36):
        e.step()
        assert len(tracker._computed) <= 1
    shown = {(slot.group, slot.depth) for slot in map(e.table.slot, e.ready())}
    assert shown == {(0, index) for index in range(11)} | {(1, index) for index in (6, 7, 8)}


def test_the_boundary_that_vllm_has_found_itself_stays(engine: Make, peer_of: Any) -> None:
    """A prompt shares two blocks with one of this engine and six with a peer's.  In plain vLLM the
    next prompt with the two blocks hits; so it does here."""
    e = with_sparse_windows(engine, full(), window(WINDOW))
    peer = peer_of(e)
    e.add("first", prompt(2, tail=0) + prompt(8, first=900))
    e.step()
    asked = prompt(10)
    request = e.add("imagined", asked[: 6 * BLOCK_SIZE] + prompt(4, first=500), max_tokens=1)
    peer.hold(request, Part(0, 0, 10), Part(1, 7, 3))
    e.scheduler.finish_requests("imagined", request.status.FINISHED_ABORTED)
    e.add("a", asked)
    e.schedule()
    assert hashed(e) == {0, 1} | {7, 8, 9}


def zeroed(e: DrivenEngine, sent: Any) -> set[int]:
    """The new blocks that vLLM's worker is told to zero before the step."""
    assert e.scheduler.needs_kv_cache_zeroing
    return set(sent.output.new_block_ids_to_zero or ())


@pytest.mark.parametrize("attached", [False, True])
def test_vllm_does_not_zero_what_a_step_loads(engine: Make, peer_of: Any, attached: bool) -> None:
    """On a GPU the zeros might come behind the copy.  It zeroes nothing of asynchronous loads, and
    the blocks that the step computes itself."""
    other = dataclasses.replace(window(WINDOW), dtype=torch.float16)
    e = engine(num_blocks=64, specs=[full(), other])
    peer, rank = peer_of(e), Played(e)
    peer.hold_all(prompt(6))
    if attached:
        peer.attached()
    e.add("a", prompt(8), max_tokens=1)
    sent = e.schedule()
    (load,) = sent.metadata.at_once or sent.metadata.loads
    assert bool(sent.metadata.at_once) == attached
    computed = {b for table in e.tables_of("a") for b in table[6:]}
    assert zeroed(e, sent) == computed
    assert not zeroed(e, sent) & set(load.targets)
    rank.run(sent, LoadReport(load.load_id, load.targets[:1]))  # computed after all, from zeros
    sent = e.schedule()
    assert zeroed(e, sent) == {b for table in e.tables_of("a") for b in table} - {0}


def test_tokens_are_counted_once_although_several_groups_are_imported(
    engine: Make, peer_of: Any
) -> None:
    e = engine(num_blocks=64, specs=[full(), window(WINDOW), window(WINDOW)])
    peer, rank = peer_of(e), Played(e)
    peer.hold_all(prompt(6))
    e.add("a", prompt(6), max_tokens=1)
    rank.finish()
    read = e.table.counters.read
    assert (read(IMPORTED_BLOCKS), read(IMPORTED_TOKENS)) == (6 + 3 + 3, 6 * BLOCK_SIZE)


def test_a_failed_load_brings_no_tokens(engine: Make, peer_of: Any) -> None:
    e = engine(num_blocks=64, specs=[full(), window(WINDOW)])
    peer, rank = peer_of(e), Played(e)
    peer.hold_all(prompt(6))
    e.add("a", prompt(6), max_tokens=1)
    (load,) = (sent := e.schedule()).metadata.loads
    rank.run(sent, LoadReport(load.load_id, load.targets[-1:]))
    assert e.table.counters.read(IMPORTED_TOKENS) == 0


def test_a_peer_in_quarantine_is_the_reason_of_a_miss_in_larger_blocks_too(
    engine: Make, peer_of: Any
) -> None:
    e = engine(num_blocks=64, specs=[window(100, 2), full()])
    peer = peer_of(e)
    peer.hold_all(prompt(6))
    peers = e.connector._scheduler.cache.epoch_state.peers
    for _ in range(3):
        peers.load_failed(Epoch(PEER))
    e.add("a", prompt(6))
    e.schedule()
    assert e.table.counters.read(MISS_QUARANTINED) == 1


def test_without_full_attention_nothing_is_common(engine: Make, peer_of: Any) -> None:
    e = with_sparse_windows(engine, window(WINDOW), window(60))
    peer_of(e)
    request = e.add("a", prompt(10))
    e.schedule()
    assert request.shared_prefix_boundary == 0


def shown_to(e: DrivenEngine, request: Any) -> int:
    """How many tokens of a prompt another engine can import, of full attention and states."""
    groups, hashes = e.connector._scheduler.importer.lookups.groups.all, request.block_hashes
    shown = {(slot.group, bytes(slot.block_hash)) for slot in map(e.table.slot, e.ready())}
    lengths = [0]
    for length in range(1, len(hashes) - groups[0].ahead + 1):
        if (0, hashes[length - 1 + groups[0].ahead]) in shown and (1, hashes[length - 1]) in shown:
            lengths.append(length)
    return lengths[-1] * BLOCK_SIZE


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("drafts", ["", "ngram", "layers"])
@pytest.mark.parametrize("tail", [0, 5])
def test_the_state_behind_each_turn_of_a_conversation_is_shared(
    engine: Make, monkeypatch: pytest.MonkeyPatch, drafts: str, checkpoints: int, tail: int
) -> None:
    """All that would be a local hit.  With draft layers vLLM keeps a prefill checkpoint one block
    before its place in the table."""
    monkeypatch.setattr(SpeculativeConfig, "use_eagle", lambda _: drafts == "layers")
    settings = {"speculative_config": SPECULATION} if drafts else {}
    specs, drafting = [full(), states(checkpoints, drafts=3 * bool(drafts))], drafts == "layers"
    e = engine(num_blocks=100, specs=specs, drafting=0 if drafting else None, **settings)
    e.scheduler.kv_cache_manager.coordinator.retention_interval = 0
    rank, tokens = Played(e), prompt(4, tail=tail)
    for turn in range(4):
        request = e.add(f"turn {turn}", tokens, max_tokens=3)
        rank.finish()
        e.step()
        tokens = [*request.all_token_ids, *prompt(2, tail=tail, first=1000 * (turn + 1))]
        following = e.add("following", tokens)
        local = e.scheduler.kv_cache_manager.get_computed_blocks(following)[1]
        e.scheduler.finish_requests("following", following.status.FINISHED_ABORTED)
        assert shown_to(e, following) == local >= (2 + 2 * turn) * BLOCK_SIZE


def test_what_was_imported_once_is_a_local_hit_of_the_next_prompt(
    engine: Make, peer_of: Any
) -> None:
    """The peer's prompts go on with the same two blocks behind a begin of six; this engine's each
    go on in another way.  The windows at the end of what was imported are kept."""
    e = with_sparse_windows(engine, full(), window(WINDOW))
    peer, rank = peer_of(e), Played(e)
    asked = prompt(8)
    request = e.add("imagined", asked, max_tokens=1)
    peer.hold(request, Part(0, 0, 8), Part(1, 3, 3))
    e.scheduler.finish_requests("imagined", request.status.FINISHED_ABORTED)
    e.add("first", asked[: 7 * BLOCK_SIZE] + prompt(2, first=600), max_tokens=1)
    (load,) = rank.finish()
    assert load.length == 6
    e.add("second", asked[: 6 * BLOCK_SIZE] + prompt(2, first=700), max_tokens=1)
    assert rank.finish() == []
    assert e.scheduler.requests.get("second") is None
    _, tokens, _ = e.scheduler.kv_cache_manager.get_computed_blocks(
        e.add("third", asked[: 6 * BLOCK_SIZE] + prompt(2, first=800))
    )
    assert tokens == 6 * BLOCK_SIZE
