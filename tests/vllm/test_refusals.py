"""Why an engine does not share: each reason on a configuration of vLLM's own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvshm.hooks.connector import KvshmConnector
from kvshm.hooks.refusals import (
    cache_refusal,
    config_refusal,
    export_refusal,
    touchpoint_refusal,
)

from .tiny_config import cache_config, engine_config, spec

SEVERAL_SHAPES = {"layer.0": spec(), "layer.1": spec(head_size=32)}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return engine_config(tmp_path_factory.mktemp("model"), {})


@pytest.fixture
def plan(config: VllmConfig) -> KVCacheConfig:
    return cache_config(config, "LBNHC", 8, {"layer.0": spec(), "layer.1": spec()})


def test_an_ordinary_engine_is_not_refused(config: VllmConfig, plan: KVCacheConfig) -> None:
    assert config_refusal(config, {}) is None
    assert cache_refusal(plan) is None
    assert export_refusal(config) is None


def test_layers_of_several_shapes_in_one_group_are_fine(config: VllmConfig) -> None:
    assert cache_refusal(cache_config(config, "BLNHC", 8, SEVERAL_SHAPES)) is None


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("cache_config", {"enable_prefix_caching": False}, "prefix caching is off"),
        ("cache_config", {"use_replayssm": True}, "ReplaySSM"),
        ("model_config", {"runner_type": "pooling"}, "pooling model"),
        ("device_config", {"device_type": "tpu"}, "no transport"),
        ("model_config", {"is_encoder_decoder": True}, "encoder-decoder"),
        ("parallel_config", {"distributed_executor_backend": "ray"}, "Ray runs the workers"),
        (
            "parallel_config",
            {"distributed_executor_backend": type("OnRay", (), {"uses_ray": True})},
            "Ray runs the workers",
        ),
        ("attention_config", {"hisparse_config": object()}, "HiSparse"),
    ],
)
def test_a_configuration_is_refused_with_the_reason(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    change: dict[str, Any],
    reason: str,
) -> None:
    for name, value in change.items():
        monkeypatch.setitem(vars(getattr(config, part)), name, value)
    assert reason in str(config_refusal(config, {}))


def test_without_a_model_there_is_nothing_to_share(tmp_path: Path) -> None:
    assert config_refusal(VllmConfig(), {}) == "there is no model"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_cache_that_may_move_is_refused(config: VllmConfig, name: str) -> None:
    environ = {name: "garbage_collection_threshold:0.8,expandable_segments:True"}
    assert name in str(config_refusal(config, environ))
    assert config_refusal(config, {name: "expandable_segments:False"}) is None


def test_only_a_single_group_of_full_causal_attention_is_shared(plan: KVCacheConfig) -> None:
    group = plan.kv_cache_groups[0]
    two = dataclasses.replace(plan, kv_cache_groups=[group, group])
    assert "2 KV cache groups" in str(cache_refusal(two))
    window = SlidingWindowSpec(
        32, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=64
    )
    for wrong in (window, spec(non_causal=True)):
        groups = [KVCacheGroupSpec(["layer.0"], wrong)]
        refusal = cache_refusal(dataclasses.replace(plan, kv_cache_groups=groups))
        assert "no full causal attention" in str(refusal)


def test_a_cache_without_hashes_is_refused(plan: KVCacheConfig) -> None:
    assert cache_refusal(dataclasses.replace(plan, hash_block_size=None)) == "blocks are not hashed"


def test_priority_scheduling_only_imports(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "m", {}, scheduling_policy="priority")
    assert config_refusal(config, {}) is None
    assert "never computed" in str(export_refusal(config))


def test_a_setting_that_vllm_no_longer_has_is_named(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "cache_config", object())
    assert config_refusal(config, {}) == "in this vLLM object has no enable_prefix_caching"


def test_a_connector_interface_that_has_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert touchpoint_refusal() is None
    with monkeypatch.context() as patch:
        patch.setattr(KvshmConnector, "__abstractmethods__", frozenset({"new_duty"}))
        assert touchpoint_refusal() == "this vLLM wants connectors to have new_duty"
    monkeypatch.setitem(sys.modules, "kvshm.hooks.connector", None)
    assert str(touchpoint_refusal()).startswith("this vLLM is not as kvshm knows it: ")
