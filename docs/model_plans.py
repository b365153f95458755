"""How vLLM keeps the KV of a model's layers, found without weights, and what kvshm says to it.

    python docs/model_plans.py            plan all of the registry, write docs/models.jsonl
    python docs/model_plans.py --check    compare what was written; with names, only these

Each minor version of vLLM writes its own rows: run it with `.venv` and with `.venv-0.33`.  Then
``make docs`` makes the table of docs/models.md of them.

The model's class is built as the engine builds it, but its weights are tensors without memory.
Everything behind that is vLLM's own, up to ``EngineCore``: the layers' specs, the layout, the
groups, the block sizes; and ``kvshm.hooks.vllm`` is asked as in an engine.  What the machine lacks
and a plan does not need is played (``played_machine``): this changes classes of the process for
good, so it runs in a process of its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_PLUGINS": ""}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}

import torch
import vllm
from model_configs import configuration
from model_table import NO_CONFIGURATION, NOT_BUILT, Plan, differences, read, write
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, iter_layer_specs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.worker_base import get_current_attn_backends
from vllm.v1.worker.workspace import init_workspace_manager

from kvshm.hooks.vllm.identity.refusals import cache_refusal, config_refusal

ASK, ASKED = "with --enable-prefix-caching", {"enable_prefix_caching": True}
MEMORY = 1 << 36
TOKENS = 1024
NOT_NEEDED = (
    "torchvision", "timm", "open_clip", "librosa", "av", "cv2", "torchaudio", "decord",  # inputs
    "cutlass", "cuda", "tvm_ffi", "quack", "flashinfer",  # kernels
)  # fmt: skip
"""Packages that some models import for what a plan does without."""


class _Absent(types.ModuleType):
    """Stands in for a package that is not installed; whatever is asked for is an empty class."""

    __path__ = []  # noqa: RUF012 - as the import system expects it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__absent__": True})


class _Anything(type):
    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls if isinstance(cls.__dict__.get("__absent__"), bool) else type.__call__(cls)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {"__absent__": True})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, so what is installed is imported."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in NOT_NEEDED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _NoWeights(TorchFunctionMode):  # type: ignore[misc]
    """Weights get no memory; tables that layers compute at their start do."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **(kwargs or {}) | more)


def played_machine() -> None:
    """Make this process plan as on a machine that has what the models are made for: AMX, AVX-512,
    kernels for sparse attention, streams.  vLLM's CPU build plans without prefix caching where it
    has none."""
    sys.meta_path.append(_Finder())
    of_cpus = CpuPlatform.get_attn_backend_cls.__func__

    def backend(cls: Any, *args: Any, **kwargs: Any) -> str:
        chosen = kwargs.get("attn_selector_config", args[-1] if args else None)
        if getattr(chosen, "use_sparse", False):
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        return str(of_cpus(cls, *args, **kwargs))

    def inspect(model: Any) -> Any:
        return registry._ModelInfo.from_model_cls(model.load_model_cls())

    torch.accelerator.empty_cache = lambda: None
    torch.cuda.Event = torch.cuda.Stream = type("Played", (), {"__init__": _nothing})
    init_workspace_manager(torch.device("meta"))
    CpuPlatform.get_attn_backend_cls = classmethod(backend)
    torch.cpu._is_amx_tile_supported = lambda: True
    torch.cpu._is_avx512_supported = torch.cpu._is_avx512_bf16_supported = lambda: True
    # vLLM would start a process for each model.
    registry._LazyRegisteredModel.inspect_model_cls = inspect


def plan(architecture: str, config: Mapping[str, Any]) -> Plan:
    """Return how vLLM plans a cache for this configuration, a process that has called
    ``played_machine``.  Raises whatever vLLM raises if the model cannot be built here."""
    try:
        found = _plan(architecture, config, {})
    except ValueError as exc:
        if ASK not in str(exc):
            raise
        return replace(_plan(architecture, config, ASKED), reuses="if asked")
    if found.reuses == "always":
        return found
    asked = _plan(architecture, config, ASKED)
    return replace(asked, reuses="if asked") if asked.reuses == "always" else found


def _plan(architecture: str, written: Mapping[str, Any], arguments: Mapping[str, Any]) -> Plan:
    with tempfile.TemporaryDirectory() as folder:
        config = _engine_config(architecture, written, Path(folder), arguments)
        _join()
        with set_current_vllm_config(config):
            _build(config)
            worker = _OneWorker(config)
            engine: Any = types.SimpleNamespace(model_executor=worker)
            cache = EngineCore._initialize_kv_caches(engine, config)
    reuses = "always" if config.cache_config.enable_prefix_caching else "never"
    refusal = config_refusal(config, {}) or cache_refusal(cache) or cache_refusal(worker.cache)
    groups = [group_text(group.kv_cache_spec) for group in worker.cache.kv_cache_groups]
    counted = [f"{count} x {group}" for group, count in Counter(groups).items()]
    return Plan(architecture, tuple(counted), reuses, refusal)


def _engine_config(
    architecture: str, written: Mapping[str, Any], folder: Path, arguments: Mapping[str, Any]
) -> VllmConfig:
    kind = written["model_type"]
    if kind not in {*CONFIG_MAPPING, *_CONFIG_REGISTRY}:
        AutoConfig.register(kind, type("Written", (PreTrainedConfig,), {"model_type": kind}))
    (folder / "config.json").write_text(json.dumps({**written, "architectures": [architecture]}))
    transfer = KVTransferConfig(
        kv_connector="KvshmConnector",
        kv_connector_module_path="kvshm.hooks.connector",
        kv_role="kv_both",
    )
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
        dtype="bfloat16", max_model_len=TOKENS, kv_transfer_config=transfer,
        language_model_only=architecture in registry._MULTIMODAL_MODELS, **arguments,
    ).create_engine_config()  # fmt: skip


def _join() -> None:
    """Model classes ask how many ranks there are; experts, how many share them."""
    if not torch.distributed.is_initialized():
        with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as folder:
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)


def _build(config: VllmConfig) -> None:
    with _NoWeights(), set_default_torch_dtype(torch.bfloat16):
        initialize_model(config)
    current_platform.update_block_size_for_backend(config)


class _OneWorker:
    """What the engine's core asks its workers for before there is a cache."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [get_kv_cache_spec(self._config)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(self._config))
        return [[layout.name for layout in layouts]]

    def determine_available_memory(self) -> list[int]:
        return [MEMORY]

    def initialize_from_config(self, caches: list[KVCacheConfig]) -> None:
        """The worker's cache has each layer of a group, the scheduler's one for all."""
        (self.cache,) = caches

    set_kv_cache_layout = compile_or_warm_up_model = _nothing


KINDS = {
    "FullAttentionSpec": "full attention",
    "MLAAttentionSpec": "latents",
    "SlidingWindowSpec": "window of {sliding_window}",
    "SlidingWindowMLASpec": "window of {sliding_window} latents",
    "ChunkedLocalAttentionSpec": "chunks of {attention_chunk_size}",
    "MambaSpec": "state ({mamba_type})",
    "CircularBufferSpec": "ring for each request",
    "CrossAttentionSpec": "cross attention",
}


def group_text(group: KVCacheSpec) -> str:
    """Return a group's kind of cache, and the tokens in a block of it."""
    kinds = sorted({_kind(spec) for spec in iter_layer_specs(group)})
    return f"{' and '.join(kinds)}, {group.block_size} tokens"


def _kind(spec: KVCacheSpec) -> str:
    name = type(spec).__name__
    facts = {field: getattr(spec, field) for field in spec.__dataclass_fields__}
    if "mamba_type" in facts:
        facts["mamba_type"] = facts["mamba_type"].name.lower()
    if getattr(facts.get("cache_role"), "name", "") == "INDEXER":
        return "keys of an indexer"
    states = facts.get("tokens_per_state", 1)
    compressed = name == "MLAAttentionSpec" and states != 1
    return KINDS.get(name, name).format(**facts) + f" of {states} tokens each" * compressed


def planned(architecture: str) -> Plan:
    """Return the plan, or that there is none."""
    try:
        if (config := configuration(architecture)) is None:
            return Plan(architecture, unplanned=NO_CONFIGURATION)
        return plan(architecture, config)
    except Exception as exc:  # any: a class of transformers or vLLM that misses something
        print(f"{architecture}: {type(exc).__name__}: {exc}"[:300], file=sys.stderr)
        return Plan(architecture, unplanned=NOT_BUILT)


def main(arguments: Sequence[str]) -> int:
    """Plan all or the named architectures, then write or compare."""
    version = ".".join(map(str, vllm.__version_tuple__[:2]))
    names = [name for name in arguments if name != "--check"]
    played_machine()
    models = [*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS]
    found = {name: planned(name) for name in names or models}
    plans = read()
    if "--check" not in arguments:
        write({**plans, version: {**plans[version], **found} if names else found})
        return 0
    written = plans[version].values()
    different = differences(found.values(), written)
    if not names:
        different += [
            f"{one.architecture} is no more" for one in written if one.architecture not in found
        ]
    print("\n".join(different) or f"{len(found)} architectures are planned as was written")
    return len(different) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
