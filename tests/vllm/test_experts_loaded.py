"""Experts as vLLM's own models load them from a checkpoint, each rank its own, in one process that
is told which rank it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.model_loader import get_model

from kvshm.hooks.vllm.identity.experts import held_experts, share_of, total
from kvshm.hooks.vllm.identity.weights import weights_digest
from kvshm.hooks.weights import WeightsUnknown

from .families import MIXTURES

pytestmark = [pytest.mark.vllm, pytest.mark.long]

Digests = tuple[bytes, set[str]]
Load = Callable[[Path, int, bool], Digests]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Loads a checkpoint as each of so many ranks, which have whole experts or parts of them."""
    make: Any = FusedMoEParallelConfig.make
    monkeypatch.setenv("VLLM_DIST_IDENT", tmp_path.name)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is none

    def as_rank(size: int, rank: int, whole: bool) -> None:
        kind = "ep" if whole else "tp"
        told = {f"{kind}_size": size, f"{kind}_rank": rank, "use_ep": whole and size > 1}
        made = staticmethod(lambda **given: dataclasses.replace(make(**given), **told))
        monkeypatch.setattr(FusedMoEParallelConfig, "make", made)

    def rank_of(path: Path) -> tuple[bytes, str]:
        config = EngineArgs(
            model=str(path), dtype="bfloat16", enforce_eager=True, max_model_len=512
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                where = f"file://{tmp_path / 'world'}"
                parallel_state.init_distributed_environment(1, 0, where, 0, "gloo")
                parallel_state.initialize_model_parallel(1, 1)
            model = get_model(vllm_config=config)
        return share_of(held_experts(model)), weights_digest(model, None, torch.bfloat16)

    def ranks(path: Path, size: int, whole: bool) -> Digests:
        found = []
        for rank in range(size):
            as_rank(size, rank, whole)
            found.append(rank_of(path))
        return total(share for share, _ in found), {rest for _, rest in found}

    yield ranks
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_hold_the_same_experts_together_however_many_they_are(
    load: Load, name: str, tmp_path: Path
) -> None:
    """With AMX vLLM's attention of latents takes a part of the weights, so engines are refused."""
    model = MIXTURES[name](tmp_path / name)
    if name == "deepseek" and torch.cpu._is_amx_tile_supported():
        with pytest.raises(WeightsUnknown, match=r"keeps .*kv_b_proj\.weight where it cannot be"):
            load(model, 1, True)
        return
    alone, rest = load(model, 1, True)
    assert alone != bytes(32)
    assert len(rest) == 1
    assert load(model, 2, True) == load(model, 3, True) == (alone, rest)
    parts, rest_of_parts = load(model, 2, False)
    assert (parts != alone, rest_of_parts) == (True, rest)
