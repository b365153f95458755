"""The digest of a mixture's experts: it does not depend on where they lie, and on nothing less than
all of them.  The layers are played; where they have which expert is vLLM's own decision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.layers.fused_moe import expert_map_manager, routed_experts
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

from kvshm.hooks.vllm.identity.experts import PLACEMENT, held_experts, share_of, total
from kvshm.hooks.vllm.identity.weights import weights_digest
from kvshm.hooks.weights import WeightsUnknown

EXPERTS, INNER, HIDDEN = 7, 12, 4


class Checkpoint:
    """The weights of two layers, by layer and expert."""

    def __init__(self) -> None:
        seeded = torch.Generator().manual_seed(1)
        shape = 2, EXPERTS, INNER, HIDDEN
        self.up = torch.randn(shape, generator=seeded)
        self.down = torch.randn(2, EXPERTS, HIDDEN, INNER, generator=seeded)
        self.scale = torch.rand(2, EXPERTS, generator=seeded)
        self.bias = torch.randn(2, EXPERTS, generator=seeded)  # of the router, all on each rank
        self.gate = torch.randn(2, EXPERTS, HIDDEN, generator=seeded)


def parallel(size: int, rank: int, divided: bool) -> FusedMoEParallelConfig:
    """``divided``: each rank has a part of each expert, as vLLM does it without expert
    parallelism; else each has some of the experts."""
    parts, experts = (size, 1) if divided else (1, size)
    return FusedMoEParallelConfig(
        tp_size=parts,
        tp_rank=rank if divided else 0,
        ep_size=experts,
        ep_rank=0 if divided else rank,
        pcp_size=1,
        pcp_rank=0,
        dp_size=size,
        dp_rank=rank,
        sp_size=1,
        use_ep=experts > 1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )


def layer(checkpoint: Checkpoint, number: int, config: Any, strategy: str) -> torch.nn.Module:
    manager = expert_map_manager.ExpertMapManager(
        max_num_batched_tokens=8,
        top_k=1,
        global_num_experts=EXPERTS,
        num_redundant_experts=0,
        num_expert_group=2,
        moe_parallel_config=config,
        placement_strategy=strategy,
        enable_eplb=False,
    )
    made = torch.nn.Module()
    made.expert_map_manager = manager
    made.register_buffer("_expert_map", manager.expert_map, persistent=False)
    made.register_buffer("expert_mask", manager.expert_mask, persistent=False)
    places = torch.arange(EXPERTS) if manager.expert_map is None else manager.expert_map
    held, width = (places >= 0).nonzero()[:, 0], INNER // config.tp_size
    part = slice(config.tp_rank * width, (config.tp_rank + 1) * width)
    made.moe_config = SimpleNamespace(
        moe_parallel_config=config,
        num_local_experts=len(held),
        hidden_dim=HIDDEN,
        intermediate_size_per_partition=width,
    )
    tensors = {
        "w13_weight": checkpoint.up[number, held, part],
        "w2_weight": checkpoint.down[number, held][..., part],
        "w13_scale": checkpoint.scale[number, held],
        "e_score_correction_bias": checkpoint.bias[number],
    }
    for name, tensor in tensors.items():
        made.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return made


def rank_of(
    checkpoint: Checkpoint, size: int, rank: int, divided: bool = False, strategy: str = "linear"
) -> torch.nn.Module:
    model = torch.nn.Module()
    for number in (0, 1):
        block = torch.nn.Module()
        block.gate = torch.nn.Parameter(checkpoint.gate[number].clone())
        block.experts = layer(checkpoint, number, parallel(size, rank, divided), strategy)
        model.add_module(f"layer{number}", block)
    return model


def digests(models: Sequence[torch.nn.Module]) -> tuple[bytes, set[str]]:
    """All experts together, and what else each rank has."""
    shares = [share_of(held_experts(model)) for model in models]
    return total(shares), {weights_digest(model) for model in models}


def instance(checkpoint: Checkpoint, size: int, **how: Any) -> tuple[bytes, set[str]]:
    return digests([rank_of(checkpoint, size, rank, **how) for rank in range(size)])


def test_it_is_the_same_wherever_the_experts_lie(subtests: pytest.Subtests) -> None:
    alone, rest = instance(Checkpoint(), 1)
    assert len(rest) == 1
    for size in (2, 3, EXPERTS):
        for strategy in ("linear", "round_robin"):
            with subtests.test(size=size, strategy=strategy):
                assert instance(Checkpoint(), size, strategy=strategy) == (alone, rest)


def test_the_order_of_ranks_does_not_matter_and_each_counts() -> None:
    ranks = [rank_of(Checkpoint(), 3, rank) for rank in range(3)]
    alone = instance(Checkpoint(), 1)
    assert digests(ranks[::-1]) == alone
    for missing in range(3):
        assert digests(ranks[:missing] + ranks[missing + 1 :]) != alone


def swap(tensor: torch.Tensor, one: Any, other: Any) -> None:
    tensor[one], tensor[other] = tensor[other].clone(), tensor[one].clone()


CHANGES: dict[str, Callable[[Checkpoint], object]] = {
    "an element of the last expert": lambda c: c.down[1, 6, 3, 11].add_(1),
    "a scale": lambda c: c.scale[0, 3].mul_(2),
    "two experts swapped": lambda c: [swap(t, (0, 1), (0, 5)) for t in (c.up, c.down, c.scale)],
    "an expert in the other layer": lambda c: [
        swap(t, (0, 2), (1, 2)) for t in (c.up, c.down, c.scale)
    ],
    "half of an expert swapped": lambda c: swap(c.up, (0, 1), (0, 5)),
}


@pytest.mark.parametrize("how", [{}, {"divided": True}], ids=["whole", "divided"])
def test_every_change_of_an_expert_shows_and_no_one_looks_at_the_rest(
    how: dict[str, Any], subtests: pytest.Subtests
) -> None:
    before, rest = instance(Checkpoint(), 3, **how)
    for name, change in CHANGES.items():
        with subtests.test(name):
            changed = Checkpoint()
            change(changed)
            after, rest_after = instance(changed, 3, **how)
            assert after != before
            assert rest_after == rest


@pytest.mark.parametrize("name", ["bias", "gate"])
def test_the_router_belongs_to_the_rest(name: str) -> None:
    before, rest = instance(Checkpoint(), 3)
    changed = Checkpoint()
    getattr(changed, name)[1, 6] += 1
    after, rest_after = instance(changed, 3)
    assert after == before
    assert not rest & rest_after


def test_parts_of_experts_count_by_their_place() -> None:
    """An instance that divides experts shares with one that divides them alike."""
    found = {size: instance(Checkpoint(), size, divided=True) for size in (1, 2, 3)}
    assert found[2] == instance(Checkpoint(), 2, divided=True)
    assert len({experts for experts, _ in found.values()}) == 3
    swapped = Checkpoint()
    swap(swapped.up, (0, 1, slice(0, 6)), (0, 1, slice(6, 12)))
    swap(swapped.down, (0, 1, slice(None), slice(0, 6)), (0, 1, slice(None), slice(6, 12)))
    assert instance(swapped, 2, divided=True)[0] != found[2][0]


def test_a_model_without_experts_has_none() -> None:
    model = torch.nn.Linear(3, 3)
    assert held_experts(model) == []
    assert total([share_of([])]) == bytes(32)


def test_models_of_one_engine_are_told_apart() -> None:
    held = held_experts(rank_of(Checkpoint(), 1, 0))
    assert share_of(held, model="0") != share_of(held, model="1")


def test_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_kernel(kernel: object) -> str:
        model = rank_of(Checkpoint(), 1, 0)
        model.layer0.experts.quant_method = SimpleNamespace(  # type: ignore[union-attr]
            moe_kernel=SimpleNamespace(fused_experts=kernel)
        )
        return weights_digest(model)

    assert with_kernel(1) == with_kernel(2) != with_kernel(1.5)
    assert len({with_kernel(1), with_kernel(""), weights_digest(rank_of(Checkpoint(), 1, 0))}) == 3


def test_vllm_has_these_buffers_and_names() -> None:
    source = inspect.getsource(routed_experts.RoutedExperts)
    for name in (*PLACEMENT, "e_score_correction_bias", "hash_indices_table"):
        assert f'"{name}"' in source
    for name in ("expert_map_manager", "moe_config", "quant_method"):
        assert f"self.{name} = " in source


def test_a_module_without_weights_of_its_own_holds_no_experts() -> None:
    """A layer's runner has the layer's configuration, too."""
    model, runner = rank_of(Checkpoint(), 1, 0), torch.nn.Module()
    held: Any = model.layer0.experts  # type: ignore[union-attr]
    runner.moe_config, runner.expert_map_manager = held.moe_config, held.expert_map_manager
    model.runner = runner
    assert [each.layer for each in held_experts(model)] == ["layer0.experts", "layer1.experts"]


@pytest.mark.parametrize("taken", [["w13_weight", "w2_weight"], ["w13_weight"], ["w2_weight"]])
def test_experts_that_are_kept_elsewhere_are_unknown(taken: list[str]) -> None:
    """vLLM's kernels for MXFP4 keep matrices in objects of their own; biases stay parameters, and
    with some of them scales."""
    one = layer(Checkpoint(), 0, parallel(1, 0, divided=False), "linear")
    one.__class__ = type("RoutedExperts", (torch.nn.Module,), {})
    for matrix in ("w13", "w2"):
        scales = torch.ones(EXPERTS, INNER // 2, 1, dtype=torch.uint8)
        one.register_parameter(f"{matrix}_scales", torch.nn.Parameter(scales, requires_grad=False))
    assert len(held_experts(one)) == 1
    for matrix in taken:
        delattr(one, matrix)
    with pytest.raises(WeightsUnknown, match="keeps the experts of  where they cannot be read"):
        held_experts(one)
