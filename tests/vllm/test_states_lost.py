"""What happens to an exporter while states and blocks of attention are copied from it: every byte
of what arrives is right, or the block counts as lost, and with it the whole import (test_groups.py,
where each block in turn is the one that is lost).

vLLM's worker imports into the cache that vLLM plans for Qwen 3 Next; the exporter is a process with
another one, which has fewer blocks.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvshm import _native
from kvshm._base.ids import BlockId, Epoch
from kvshm._base.syncpoints import SyncPoint
from kvshm._engine.load_plan import LoadOrder, LoadReport, Piece
from kvshm._rank import rank_load
from kvshm.hooks.vllm.identity.layout import Placement, regions_of
from kvshm.hooks.vllm.messages import StepMetadata
from kvshm.interfaces import Region

from ..sessions import new_namespace
from .cuda_workers import finished, until
from .lending_rank import Lent, content
from .test_latents import Specs, Worker, allocated, block_bytes, fill, planned, play_a_model
from .test_latents import config as config

TOKENS = 384
BLOCKS = {2: 5, 3: 6, 9: 1, 4: 7, 7: 3, 8: 2}
"""Three blocks of attention, then a state of each group: the exporter's by the importer's."""
ATTENTION, STATE = 3, 7
OURS, THEIRS = Epoch(1), Epoch(2)


def qwen3_next() -> Specs:
    """That of families.py."""
    full = FullAttentionSpec(TOKENS, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    state = MambaSpec(
        TOKENS, shapes=((3, 512), (2, 128, 128)), dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=full.page_size_bytes, mamba_cache_mode="align",
    )  # fmt: skip
    return {"layers.3.attn": full} | {f"layers.{i}.linear_attn": state for i in range(3)}


def placed(config: VllmConfig, num_blocks: int) -> Placement:
    plan = planned(config, qwen3_next(), num_blocks)
    placement = regions_of(plan, allocated(plan))
    assert isinstance(placement, Placement), placement
    return placement


class Lender:
    """The exporter (lending_rank.py)."""

    def __init__(self, where: Path, space: str, regions: Sequence[Region]) -> None:
        packed = msgspec.msgpack.encode(regions).hex()
        command = [sys.executable, "-m", "tests.vllm.lending_rank", str(where), space, str(THEIRS)]
        self.process = subprocess.Popen(
            [*command, packed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, what: object) -> str:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(what) + "\n")
        stdin.flush()
        return stdout.readline()

    def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


class Pair:
    """The importer, in this process, and the exporter."""

    def __init__(self, config: VllmConfig, where: Path) -> None:
        space = new_namespace()
        self.importer = Worker(config, planned(config, qwen3_next(), 12), where, space, OURS)
        placement = self.importer.side._placement
        assert placement is not None
        self.placement: Placement = placement
        self.lender = Lender(where, space, placed(config, 11).regions)
        self.importer.begin(StepMetadata(step=1, open_epoch=OURS))

    def bytes_of(self, block: int) -> list[bytes]:
        return [bytes(part.numpy().tobytes()) for part in block_bytes(self.placement, block)]

    def load(self) -> LoadReport:
        lent = msgspec.msgpack.decode(bytes.fromhex(self.lender.tell([*BLOCKS])), type=Lent)
        targets = tuple(BlockId(target) for target in BLOCKS.values())
        piece = Piece(THEIRS, (lent.memory,), lent.shown, bytes(len(targets)), targets, 8)
        ticket = self.importer.served.table.take_ticket(1)
        assert ticket is not None
        load = LoadOrder("request", OURS, ticket, 0, (piece,), ())
        self.importer.begin(StepMetadata(step=2, loads=[load]))
        until(lambda: "request" in finished(self.importer.side))
        (report,) = self.importer.side.take_report().loads
        return report

    def close(self) -> None:
        self.lender.close()
        self.importer.close()


@pytest.fixture
def pair(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    play_a_model(monkeypatch)
    where = Path(tempfile.mkdtemp(prefix="kv-"))
    made = Pair(config, where)
    fill(made.importer.caches, OURS)
    yield made
    made.close()
    shutil.rmtree(where)


def reused(block: int) -> Callable[[Lender], object]:
    return lambda lender: lender.tell(block)


HAPPENS: dict[str, tuple[Callable[[Lender], object], list[set[int]]]] = {
    "its state is reused": (reused(STATE), [{STATE}]),
    "its attention is reused": (reused(ATTENTION), [{ATTENTION}]),
    "it is killed": (Lender.close, [set(), {*BLOCKS}]),  # its memory stays as it was
    "it is stopped": (lambda lender: lender.process.send_signal(signal.SIGSTOP), [set()]),
}
"""And which blocks may be lost by it."""


def test_an_import_is_one_copy_of_its_blocks_pages(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 192 KiB each, 131 of which a state has; layers of all groups lie in the same pages."""
    copied, copy = [], _native.copy_blocks

    def counted(source: Any, target: Any, here: Any, there: Any, stop: Any) -> int:
        copied.append((len(here), [nbytes for _, _, nbytes, _ in target]))
        return copy(source, target, here, there, stop)

    monkeypatch.setattr(_native, "copy_blocks", counted)
    assert not pair.load().bad
    assert copied == [(len(BLOCKS), [192 << 10])]
    state = qwen3_next()["layers.0.linear_attn"]
    assert isinstance(state, MambaSpec)
    assert (state.page_size_bytes, state.state_content_size_bytes) == (192 << 10, 131 << 10)


def amid_the_copy(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Behind the state, and before the last block."""
    copy = _native.copy_blocks

    def in_two(source: Any, target: Any, here: Any, there: Any, stop: Any) -> int:
        first = copy(source, target, here[:-1], there[:-1], stop)
        happens()
        return first + copy(source, target, here[-1:], there[-1:], stop)

    monkeypatch.setattr(_native, "copy_blocks", in_two)


@pytest.mark.parametrize("happening", HAPPENS)
@pytest.mark.parametrize("when", ["before", "amid", "after"])
def test_what_is_not_reported_as_lost_is_right_in_every_byte(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, happening: str, when: str
) -> None:
    happens, losses = HAPPENS[happening]
    before = [pair.bytes_of(block) for block in range(12)]
    point = {"before": SyncPoint.COPY_BEGINS, "after": SyncPoint.COPIED}.get(when)

    def reached(one: SyncPoint) -> None:
        if one is point:
            happens(pair.lender)

    monkeypatch.setattr(rank_load, "sync_point", reached)
    if when == "amid":
        amid_the_copy(monkeypatch, lambda: happens(pair.lender))
    report = pair.load()
    lost = {block for block, target in BLOCKS.items() if target in report.bad}
    assert lost in losses
    for block, target in BLOCKS.items():
        if block not in lost:
            before[target] = [content(THEIRS, block, len(part)) for part in before[target]]
    for target in set(range(12)) - set(report.bad):
        assert pair.bytes_of(target) == before[target], target
