"""Why an engine does not share: each reason on a configuration of vLLM's own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    supports_hma,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

import kvshm
from kvshm.config import Config
from kvshm.hooks.vllm import plugin
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.identity.refusals import cache_refusal, config_refusal
from kvshm.hooks.vllm.plain_connector import plain_connector
from kvshm.hooks.vllm.plugin import touchpoint_refusal
from kvshm.hooks.vllm.transfer_config import OUR_CONNECTOR

from .conftest import Lines
from .scheduling import BLOCK_SIZE, Make, prompt
from .tiny_config import GEMMA, MAMBA, cache_config, engine_config, spec

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 64,
}
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
        (
            "parallel_config",
            {"distributed_executor_backend": "external_launcher"},
            "external_launcher",
        ),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ("parallel_config", {"enable_fault_tolerance": True}, "--enable-fault-tolerance"),
        ("parallel_config", {"enable_eplb": True}, "--enable-eplb"),
        (
            "aux_output_config",
            {"enable_return_routed_experts": True},
            "--enable-return-routed-experts",
        ),
        (
            "parallel_config",
            {"nnodes": 2, "data_parallel_size": 1, "data_parallel_size_local": 1},
            "several machines",
        ),
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


@pytest.mark.skipif(
    not hasattr(AuxOutputSchedulerConnector, "cap_external_hit"),
    reason="vLLM 0.32 asks no connector, and hands on what is not there",
)
def test_vllm_gives_no_routed_experts_for_what_it_has_not_computed(engine: Make) -> None:
    """Why engines that return them are refused: 0.33 takes no prefix from a connector that this
    engine has not computed once."""
    e = engine()
    request = e.add("r", prompt(3))
    aux = AuxOutputSchedulerConnector(e.scheduler.kv_cache_manager, e.connector)
    assert aux.cap_external_hit(request, 0, 2 * BLOCK_SIZE) == 0
    e.step()
    assert aux.cap_external_hit(request, 0, 2 * BLOCK_SIZE) == 2 * BLOCK_SIZE


def test_an_amd_gpu_is_distinguished_from_other_cuda_devices(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(config.device_config), "device_type", "cuda")
    assert config_refusal(config, {}) is None
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
    assert "ROCm" in str(config_refusal(config, {}))

    assert "for KV caches on cuda, not rocm" in str(config_refusal(config, {}, "cuda_ipc"))


def test_data_parallel_engines_of_one_machine_each_are_shared(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"nnodes": 2, "data_parallel_size": 2, "data_parallel_size_local": 1}
    for name, value in sizes.items():
        monkeypatch.setitem(vars(config.parallel_config), name, value)
    assert config_refusal(config, {}) is None


def test_without_a_model_there_is_nothing_to_share(tmp_path: Path) -> None:
    assert config_refusal(VllmConfig(), {}) == "there is no model"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_cache_that_may_move_is_refused(config: VllmConfig, name: str) -> None:
    environ = {name: "garbage_collection_threshold:0.8,expandable_segments:True"}
    assert name in str(config_refusal(config, environ))
    assert config_refusal(config, {name: "expandable_segments:False"}) is None


SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
WINDOW = SlidingWindowSpec(32, sliding_window=64, **SHAPE)
CHUNK = ChunkedLocalAttentionSpec(32, attention_chunk_size=64, **SHAPE)
LATENTS = MLAAttentionSpec(block_size=32, tokens_per_state=4, **SHAPE)
LATENT_WINDOW = SlidingWindowMLASpec(32, sliding_window=64, **SHAPE)
NOT_CACHED = "vLLM keeps no prefixes of some layers"
STATES = MambaSpec(
    32, shapes=((16,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align", page_size_padded=4096
)


def in_groups(plan: KVCacheConfig, *specs: KVCacheSpec) -> KVCacheConfig:
    """The plan with a group of each of these kinds."""
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return dataclasses.replace(plan, kv_cache_groups=groups)


@pytest.mark.parametrize(
    "specs",
    [
        (spec(), WINDOW),
        (WINDOW, WINDOW, spec()),
        (spec(), CHUNK),
        (WINDOW,),
        (CHUNK,),
        (STATES, spec(), STATES),
        (STATES,),
        (spec(), dataclasses.replace(WINDOW, dtype=torch.float16)),
        (LATENTS,),
        (LATENT_WINDOW, LATENTS, LATENT_WINDOW),
    ],
)
def test_groups_that_keep_blocks_are_shared(
    plan: KVCacheConfig, specs: tuple[KVCacheSpec, ...]
) -> None:
    assert cache_refusal(in_groups(plan, *specs)) is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (dataclasses.replace(STATES, mamba_cache_mode="all"), "the mode is all"),
        (SlidingWindowMLASpec(32, sliding_window=64, bounded_replay=True, **SHAPE), NOT_CACHED),
        (CircularBufferSpec(32, **SHAPE), NOT_CACHED),
        (SinkFullAttentionSpec(32, sink_len=4, **SHAPE), "not known which blocks"),
        (dataclasses.replace(WINDOW, extra_retained_tokens=3), "several draft layers"),
        (spec(non_causal=True), "no causal attention"),
        (
            UniformTypeKVCacheSpecs(
                32, {"a": WINDOW, "b": dataclasses.replace(WINDOW, sliding_window=96)}
            ),
            "layers of one KV cache group need different blocks",
        ),
    ],
)
def test_a_group_that_cannot_be_shared_is_named(
    plan: KVCacheConfig, other: KVCacheSpec, reason: str
) -> None:
    """Alone, and beside one that can be."""
    for specs in ((other,), (other, spec()), (spec(), other)):
        assert reason in str(cache_refusal(in_groups(plan, *specs)))


def test_a_model_without_a_cache_is_refused(plan: KVCacheConfig) -> None:
    assert cache_refusal(in_groups(plan)) == "the model has no KV cache"


def test_a_cache_without_hashes_is_refused(plan: KVCacheConfig) -> None:
    assert cache_refusal(dataclasses.replace(plan, hash_block_size=None)) == "blocks are not hashed"


@pytest.mark.parametrize(
    ("architecture", "given"),
    [
        (GEMMA, {}),
        (GEMMA, {"disable_hybrid_kv_cache_manager": True}),
        (GEMMA, {"disable_sliding_window": True}),
        (GEMMA | {"layer_types": ["full_attention"] * 2}, {}),
        (MISTRAL, {}),
        (MISTRAL | {"sliding_window": None}, {}),
        (MAMBA, {"block_size": None}),
    ],
    ids=["mix", "one-group", "no-window", "all-full", "all-windows", "mistral", "mamba"],
)
def test_no_kind_of_layers_is_refused_by_the_configuration(
    tmp_path: Path, architecture: dict[str, Any], given: dict[str, Any]
) -> None:
    assert config_refusal(engine_config(tmp_path / "model", architecture, **given), {}) is None


def test_a_setting_that_vllm_no_longer_has_is_named(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "cache_config", object())
    assert config_refusal(config, {}) == "in this vLLM object has no enable_prefix_caching"


def test_a_connector_interface_that_has_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert touchpoint_refusal() is None
    with monkeypatch.context() as patch:
        patch.setattr(KvshmConnector, "__abstractmethods__", frozenset({"new_duty"}))
        assert touchpoint_refusal() == "this vLLM requires connectors to have new_duty"
    with monkeypatch.context() as patch:  # as in a clone, where nothing is built
        patch.delattr(kvshm, "_native")
        patch.setitem(sys.modules, "kvshm._native", None)
        assert str(touchpoint_refusal()).startswith("the kvshm that Python finds is not built")
        patch.setitem(sys.modules, "kvshm.hooks.vllm.identity.refusals", None)  # it needs C code
        said = plugin._refusal(VllmConfig(), None, Config())
        assert str(said).startswith("the kvshm that Python finds is not built")
    monkeypatch.setitem(sys.modules, "kvshm.hooks.vllm.connector", None)
    assert str(touchpoint_refusal()).startswith("this vLLM is not as kvshm knows it: ")


def test_in_the_place_of_a_connector_that_cannot_be_imported_stands_one_that_does_nothing(
    config: VllmConfig, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSHM_RUN_DIR", str(tmp_path))
    monkeypatch.setitem(vars(config), "kv_transfer_config", KVTransferConfig(**OUR_CONNECTOR))
    made = plain_connector(ImportError("no such name"))(config, KVConnectorRole.SCHEDULER, None)
    assert issubclass(type(made), KVConnectorBase_V1)
    assert supports_hma(made)
    assert not type(made).__abstractmethods__
    assert made.get_num_new_matched_tokens(None, 3) == (0, False)
    assert made.request_finished_all_groups(None, ((),)) == (False, None)
    assert isinstance(made.build_connector_meta(None), KVConnectorMetadata)
    assert made.update_state_after_alloc(None, None, 0) is None
    (line,) = [line for line in lines if "not sharing" in line]
    assert line.endswith("this vLLM is not as kvshm knows it: no such name")
