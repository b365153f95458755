"""The fingerprint's fields on vLLM's real configuration objects: what must count, counts."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import CompilationConfig, MambaConfig, SpeculativeConfig
from vllm.config.attention import AttentionConfig
from vllm.config.compilation import PassConfig
from vllm.config.kernel import KernelConfig
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils

from kvshm._base import fingerprint as names
from kvshm._base.fingerprint import FIELDS, differences, fingerprint
from kvshm.hooks.vllm.call_stack import callers_with
from kvshm.hooks.vllm.identity import fields as fields_module
from kvshm.hooks.vllm.identity import weights
from kvshm.hooks.vllm.identity.fields import (
    find_model,
    rank_fields,
    scheduler_fields,
    with_none_hash,
)

from .tiny_config import TINY_LLAMA, cache_config, engine_config, spec

Fields = dict[str, str]
TWO_LAYERS = {f"model.layers.{i}.self_attn.attn": spec() for i in range(2)}


class Backend:
    """Stands for an attention backend: only its name counts."""


class Layer:
    """Stands for an attention layer."""

    isa = "vec"

    def get_attn_backend(self) -> type[Backend]:
        return Backend


def small_model(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(8, 8)


def all_fields(
    directory: Path, architecture: dict[str, Any] | None = None, num_models: int = 1, **given: Any
) -> Fields:
    """What an engine with this configuration and one rank would join with."""
    vllm_config = engine_config(directory, architecture or {}, **given)
    kv_cache_config = cache_config(vllm_config, "LBNHC", 8, TWO_LAYERS)
    vllm_config.compilation_config.static_forward_context.update(dict.fromkeys(TWO_LAYERS, Layer()))
    models = [small_model()] * num_models
    ranks = [rank_fields(vllm_config, kv_cache_config, models)]
    return scheduler_fields(vllm_config, kv_cache_config, ranks)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    return all_fields(tmp_path_factory.mktemp("plain"))


def test_every_field_is_filled(plain: Fields) -> None:
    late = {names.NONE_HASH, names.KERNEL_BLOCKS, names.TRANSPORT}  # known elsewhere
    assert plain.keys() == set(FIELDS) - late
    assert all(isinstance(value, str) and 0 < len(value) <= 200 for value in plain.values())
    assert plain[names.MODEL] == "LlamaForCausalLM"
    assert plain[names.ATTENTION] == "Backend/vec"
    assert plain[names.HASH_ALGORITHM] == "sha256"


def test_the_same_model_elsewhere_and_with_more_blocks_is_the_same(
    plain: Fields, tmp_path: Path
) -> None:
    again = all_fields(tmp_path / "elsewhere", num_gpu_blocks_override=77, max_num_seqs=3)
    assert differences(plain, again) == {}
    assert fingerprint(plain) == fingerprint(again)


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"max_model_len": 128}),
        ({}, {"dtype": "bfloat16"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({}, {"kv_cache_dtype": "bfloat16"}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({}, {"speculative_config": NGRAM}),
        ({}, {"max_num_batched_tokens": 512, "max_num_seqs": 7}),
        ({"enforce_eager": True}, {"compilation_config": {"mode": 0}}),
        (
            {"compilation_config": {"custom_ops": ["none", "+rms_norm"]}},
            {"compilation_config": {"custom_ops": ["+rms_norm", "none", "+rms_norm"]}},
        ),
        ({}, {"compilation_config": {"cache_dir": "/elsewhere", "cudagraph_num_of_warmups": 2}}),
        ({}, {"kernel_config": {"enable_jit_warmup": False}}),
    ],
    ids=lambda value: " ".join(value) or "plain",
)
def test_what_changes_no_block_makes_no_engine_incompatible(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    fields = [all_fields(tmp_path / str(i), **given) for i, given in enumerate((one, other))]
    assert differences(*fields) == {}


LONG = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


class ReadsItsLength(torch.nn.Module):
    """Here max_model_len is read, as far as the source of this module tells."""


@pytest.mark.parametrize("why", ["dynamic positions", "code that reads it", "unreadable code"])
def test_the_longest_context_counts_where_it_may_change_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    model = small_model()
    if why == "code that reads it":
        model = torch.nn.Sequential(model, ReadsItsLength())
    if why == "unreadable code":
        model = torch.nn.Sequential(model, ReadsItsLength())
        monkeypatch.setattr(ReadsItsLength, "__module__", "made.at.runtime")
    given = {"hf_overrides": {"rope_parameters": LONG}} if why == "dynamic positions" else {}
    found = []
    for length in (128, 192):
        config = engine_config(tmp_path / str(length), {}, max_model_len=length, **given)
        cache = cache_config(config, "LBNHC", 8, TWO_LAYERS)
        found.append(rank_fields(config, cache, [model])[names.MAX_MODEL_LEN])
    assert found == ["128", "192"]


ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"architecture": {"rms_norm_eps": 1e-3}}, names.MODEL_CONFIG),
        ({"hf_overrides": {"rms_norm_eps": 1e-3}}, names.MODEL_CONFIG),
        ({"hf_overrides": {"rope_parameters": ROPE}}, names.ROPE),
        ({"dtype": "float32"}, names.DTYPE),
        ({"kv_cache_dtype": "fp8"}, names.KV_DTYPE),
        ({"kv_cache_dtype": "fp8_e5m2"}, names.KV_DTYPE),
        ({"enforce_eager": True}, names.EXECUTION),
        ({"compilation_config": {"custom_ops": ["all"]}}, names.EXECUTION),
        ({"compilation_config": {"mode": 1}}, names.EXECUTION),
        ({"moe_backend": "triton"}, names.EXECUTION),
        ({"enable_lora": True}, names.LORA),
        ({"block_size": 64}, names.BLOCK_SIZE),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, names.HASH_ALGORITHM),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_a_difference_in_the_configuration_is_named(
    plain: Fields, tmp_path: Path, given: dict[str, Any], field: str
) -> None:
    other = all_fields(tmp_path / "other", **given)
    assert field in differences(plain, other)
    assert fingerprint(plain) != fingerprint(other)


EP = {"enable_expert_parallel": True}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def test_over_how_many_ranks_a_mixture_is_spread_does_not_count_but_how_tokens_travel_does(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    def fields(number: int, **given: Any) -> Fields:
        return all_fields(tmp_path / str(number), MIXTURE, **given)

    alone, rounding = fields(0), {"all2all_backend": "deepep_low_latency"}
    alike = [{"data_parallel_size": 2}, EP | {"data_parallel_size": 4}, EP | rounding, rounding]
    for number, given in enumerate(alike, 1):
        with subtests.test(given=given):
            assert differences(alone, fields(number, **given)) == {}
    other = fields(5, data_parallel_size=2, **EP, **rounding)
    assert differences(alone, other).keys() == {names.EXECUTION}
    assert other[names.EXECUTION].endswith(", experts by deepep_low_latency")


def compiled(**given: Any) -> str:
    """The field ``execution`` of an engine that is compiled with these settings."""
    kernels, states = KernelConfig(**given.pop("kernels", {})), given.pop("states", {})
    additional = given.pop("additional", {})
    config = SimpleNamespace(
        compilation_config=CompilationConfig(mode=3, custom_ops=["none"], **given),
        kernel_config=kernels,
        attention_config=AttentionConfig(),
        mamba_config=MambaConfig(**states),
        additional_config=additional,
    )
    return fields_module._execution(config)


@pytest.mark.parametrize(
    "given",
    [
        {"pass_config": PassConfig(enable_qk_norm_rope_fusion=True)},
        {"pass_config": PassConfig(fuse_norm_quant=True)},
        {"kernels": {"enable_flashinfer_autotune": True}},
        {"kernels": {"enable_rocm_segmented_attn_autotune": True}},
        {"states": {"backend": "flashinfer"}},
        {"additional": {"gdn_prefill_backend": "triton"}},
        {"inductor_passes": {"post_grad_custom_post_pass": "textwrap.dedent"}},
        {"splitting_ops": []},
        {"use_inductor_graph_partition": True},
        {"compile_sizes": [8]},
        {"inductor_compile_config": {"max_autotune": True}},
    ],
    ids=lambda given: " ".join(given),
)
def test_what_becomes_another_kernel_counts(given: dict[str, Any]) -> None:
    assert compiled(**given) != compiled()


def test_what_is_left_out_is_a_setting_of_vllm_and_has_a_reason() -> None:
    for config in (CompilationConfig, KernelConfig, AttentionConfig, SpeculativeConfig):
        left_out = fields_module._LEFT_OUT[config.__name__]
        assert left_out.keys() <= config.__dataclass_fields__.keys()
        assert all(left_out.values())


def test_overrides_count_like_an_edited_configuration(tmp_path: Path) -> None:
    edited = all_fields(tmp_path / "a", {"rms_norm_eps": 1e-3})
    overridden = all_fields(tmp_path / "b", hf_overrides={"rms_norm_eps": 1e-3})
    assert edited == overridden


def test_batch_invariance_counts(
    plain: Fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(tmp_path / "m", {})
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    kv_cache_config = cache_config(config, "LBNHC", 8, TWO_LAYERS)
    other = scheduler_fields(config, kv_cache_config, [])
    assert other[names.BATCH_INVARIANT] == "on" != plain[names.BATCH_INVARIANT]


@pytest.mark.skipif(torch.cuda.is_available(), reason="then the GPU is the hardware")
def test_settings_of_the_libraries_that_compute_on_cpus_count(
    plain: Fields, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    other = all_fields(tmp_path / "m")
    assert differences(plain, other).keys() == {names.HARDWARE}
    assert other[names.HARDWARE] == f"{plain[names.HARDWARE]} ONEDNN_MAX_CPU_ISA=AVX2"


def test_parallel_sizes_count(plain: Fields, tmp_path: Path) -> None:
    config = engine_config(tmp_path / "m", {}, tensor_parallel_size=2)
    other = scheduler_fields(config, cache_config(config, "LBNHC", 8, TWO_LAYERS), [])
    assert differences(plain, other)[names.PARALLEL][1].startswith("tp 2, pp 1, dcp 1, pcp 1")


@pytest.mark.parametrize("change", ["layout", "heads", "order"])
def test_what_stands_in_a_block_counts(plain: Fields, tmp_path: Path, change: str) -> None:
    config = engine_config(tmp_path / "m", {})
    layers = dict(TWO_LAYERS)
    if change == "heads":
        layers = {name: spec(head_size=32, num_kv_heads=1) for name in layers}
    if change == "order":
        layers = dict(reversed(layers.items()))
    layout = "BLNHC" if change == "layout" else "LBNHC"
    kv_cache_config = cache_config(config, layout, 8, layers)
    ranks = [rank_fields(config, kv_cache_config, [small_model()])]
    other = scheduler_fields(config, kv_cache_config, ranks)
    field = names.LAYOUT if change == "layout" else names.LAYERS
    assert field in differences(plain, other)


def test_a_model_that_drafts_counts(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "m", {})
    cache = cache_config(config, "LBNHC", 8, TWO_LAYERS)
    found = {
        rank_fields(config, cache, [small_model(), *drafts])[names.WEIGHTS]
        for drafts in ([], [small_model()], [small_model(2)])
    }
    assert len(found) == 3


MIMO = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "num_nextn_predict_layers": 1,
}
"""What is other in a MiMo, which has a layer that predicts one token more."""


def drafting(folder: Path, method: str, **given: Any) -> Fields:
    """What an engine with a drafter would join with, of which everything lies in ``folder``."""
    drafter = folder / "drafter"
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text(json.dumps(TINY_LLAMA))
    elsewhere = {} if method == "mtp" else {"model": str(drafter)}
    config = {"method": method, "num_speculative_tokens": 1, **elsewhere, **given}
    return all_fields(folder, MIMO if method == "mtp" else {}, 2, speculative_config=config)


@pytest.mark.parametrize("method", ["eagle", "mtp", "draft_model"])
def test_the_same_drafter_elsewhere_is_the_same(tmp_path: Path, method: str) -> None:
    assert differences(drafting(tmp_path / "a", method), drafting(tmp_path / "b", method)) == {}


@pytest.mark.parametrize(
    "more",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"attention_backend": "FLEX_ATTENTION"},
        {"moe_backend": "triton"},
        {"parallel_drafting": True},
        {"max_model_len": 128},
    ],
    ids=lambda more: " ".join(map(str, *more.items())),
)
def test_how_drafts_are_computed_counts(tmp_path: Path, more: dict[str, Any]) -> None:
    one, other = (drafting(tmp_path / str(i), "draft_model", **m) for i, m in enumerate(({}, more)))
    assert differences(one, other).keys() == {names.SPECULATIVE}


def test_which_drafts_are_accepted_does_not_count(tmp_path: Path) -> None:
    more = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.5}
    more["max_model_len"] = 256  # as it is anyway
    one, other = (drafting(tmp_path / str(i), "draft_model", **m) for i, m in enumerate(({}, more)))
    assert differences(one, other) == {}


def test_of_a_drafter_that_vllm_does_not_show_its_path_counts(tmp_path: Path) -> None:
    def weights(folder: str, shown: int) -> str:
        config = engine_config(tmp_path / folder, {})
        config.speculative_config = SimpleNamespace(method="new", model=folder, revision=None)
        cache = cache_config(config, "LBNHC", 8, TWO_LAYERS)
        return rank_fields(config, cache, [small_model()] * shown)[names.WEIGHTS]

    assert weights("a", 1) == weights("a", 1) != weights("b", 1)
    assert weights("a", 2) == weights("b", 2)


def test_ranks_are_joined_in_their_order(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "m", {})
    kv_cache_config = cache_config(config, "LBNHC", 8, TWO_LAYERS)
    a, b = (rank_fields(config, kv_cache_config, [small_model(seed)]) for seed in (1, 2))
    b = b | {names.HARDWARE: "another"}

    def weights_and_hardware(*ranks: Fields) -> tuple[str, str]:
        joined = scheduler_fields(config, kv_cache_config, ranks)
        return joined[names.WEIGHTS], joined[names.HARDWARE]

    assert weights_and_hardware(a, b)[0] != weights_and_hardware(b, a)[0]
    assert weights_and_hardware(a, b)[1] == f"{a[names.HARDWARE]} | another"
    assert weights_and_hardware(a, a)[1] == a[names.HARDWARE]
    assert weights_and_hardware(a) != weights_and_hardware(a, a)


def some_fields(directory: Path) -> Fields:
    config = engine_config(directory, {}, enable_lora=True)
    return scheduler_fields(config, cache_config(config, "LBNHC", 8, {"layer": spec()}), [])


def test_another_process_reads_the_same_fields(tmp_path: Path) -> None:
    """Nothing in them depends on addresses, on hash seeds or on the order of sets."""
    code = (
        "from pathlib import Path\n"
        "from tests.vllm.tiny_config import cache_config, engine_config, spec\n"
        "from kvshm.hooks.vllm.identity.fields import scheduler_fields\n"
        "Fields = dict\n"
        f"{inspect.getsource(some_fields)}\n"
        f"print(some_fields(Path({str(tmp_path / 'm')!r})))"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    reported = subprocess.run(
        command, env=environ, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert reported.returncode == 0, reported.stderr
    assert reported.stdout.splitlines()[-1] == str(some_fields(tmp_path / "m"))


def test_the_none_hash_is_known_once_vllm_has_chosen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH", raising=False)
    assert with_none_hash({"dtype": "d"}) is None
    kv_cache_utils.init_none_hash(sha256)
    found = with_none_hash({"dtype": "d"})
    assert found is not None
    assert set(found) == {"dtype", names.NONE_HASH}
    assert found[names.NONE_HASH].startswith("066b1e89")


class Runner:
    """Calls its connector as vLLM's model runner does, from a method of its own."""

    def __init__(self, model: object) -> None:
        self.model = model

    def get_model(self) -> object:
        return self.model

    def initialize_kv_cache(self) -> torch.nn.Module | None:
        return Connector().register_kv_caches({})


class Connector:
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> torch.nn.Module | None:
        owners = (lambda: callers_with("get_model"))()  # one frame more, and it has no self
        return find_model(owners)


def test_the_model_is_found_at_the_caller() -> None:
    model = small_model()
    assert Runner(model).initialize_kv_cache() is model


def test_no_model_is_none() -> None:
    assert Runner("no module").initialize_kv_cache() is None
    assert callers_with("get_model", depth=1) == []


def test_vllms_runners_still_have_get_model() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    for runner in (CPUModelRunner, GPUModelRunner):
        assert callable(runner.get_model)
        assert callable(runner.get_draft_model)
        assert callable(runner.initialize_kv_cache)


class Trained(Runner):
    """A runner whose weights are written in the kernels' format, past the model's own method."""

    def reload_weights(self, given: dict[str, torch.Tensor]) -> None:
        inplace = pytest.importorskip("vllm.model_executor.model_loader.reload.inplace")
        model_config = SimpleNamespace(quantization=None)
        vllm_config = SimpleNamespace(model_config=model_config, load_config=None, lora_config=None)
        with torch.no_grad():
            inplace.reload_weights(vllm_config, self.model, iter(given.items()), None, False)


def test_weights_that_a_runner_writes_are_noticed_before() -> None:
    model = small_model()
    runner = Trained(model)
    name, old = next(iter(model.named_parameters()))
    seen: list[torch.Tensor] = []
    weights.watch_weights([model, runner], lambda: seen.append(old.detach().clone()))
    before = old.detach().clone()
    runner.reload_weights({name: torch.zeros_like(old)})
    assert not old.any()
    assert len(seen) == 1
    assert seen[0].equal(before)


def test_vllms_workers_write_weights_by_the_methods_that_are_watched() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    found = {name for owner in (CPUWorker, GPUModelRunner) for name in dir(owner)}
    assert set(weights._WRITERS) - {"load_weights"} <= found
    writers = {name for name in found if name.endswith(("_weights", "_weight_update"))}
    drafts_only = {"start_draft_weight_update", "_start_weight_update"}
    assert writers - drafts_only <= set(weights._WRITERS)
