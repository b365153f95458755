"""A manager that cannot share says why, and serves on."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    MistralConfig,
)
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvshm.hooks.transformers import managers, node_of, share
from kvshm.hooks.transformers.refusals import (
    cache_refusal,
    interface_refusal,
    manager_refusal,
)
from kvshm.hooks.transformers.versions import TESTED, untested

from .conftest import Lines, MakeManager
from .managers import ask, end, random_prompt, start


class Packed(torch.Tensor):
    pass


def pack(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is going to remove it
        model.model.layers[0].mlp.gate_proj = torch.ao.nn.quantized.dynamic.Linear(256, 512)


def replace_a_class(model: Any) -> None:
    model.model.norm.__class__ = type("MyNorm", (type(model.model.norm),), {})


@pytest.fixture
def processor(manager: MakeManager) -> Any:
    """What ``cache_refusal`` looks at, of a manager that can share."""
    made = manager()
    made.warmup()
    real = made.batch_processor
    return SimpleNamespace(
        cache=real.cache,
        distributed_helper=SimpleNamespace(tp_size=1),
        use_async_batching=real.use_async_batching,
        model=made.model,
    )


REFUSED: dict[str, tuple[str, Callable[[Any], object]]] = {
    "cuda": ("the cache is on cuda", lambda p: setattr(p.cache, "device", torch.device("cuda"))),
    "tensor parallel": (
        "tensor parallelism",
        lambda p: setattr(p.distributed_helper, "tp_size", 2),
    ),
    "windows": (
        "layers of full_attention, sliding_attention",
        lambda p: p.cache.cache_allocators.update(sliding_attention=None),
    ),
    "no prefixes": (
        "allow_block_sharing is off",
        lambda p: setattr(p.cache, "use_prefix_sharing", False),
    ),
    "asynchronous": (
        "use_async_batching is on",
        lambda p: setattr(p, "use_async_batching", True),
    ),
    "adapters": (
        "the model has adapters",
        lambda p: setattr(p.model, "_hf_peft_config_loaded", True),
    ),
    "hooks": (
        "part 'model.norm' has forward hooks",
        lambda p: p.model.model.norm.register_forward_hook(lambda *_: None),
    ),
    "hooks before": (
        "part 'model.norm' has forward hooks",
        lambda p: p.model.model.norm.register_forward_pre_hook(lambda *_: None),
    ),
    "another forward": (
        "part 'model.norm' has a forward of its own",
        lambda p: setattr(p.model.model.norm, "forward", lambda states: states),
    ),
    "compiled": ("'LlamaForCausalLM' is compiled", lambda p: p.model.compile()),
    "packed weights": (
        "the model stores 'model.layers.0.mlp.gate_proj.scale', which is no parameter or buffer",
        lambda p: pack(p.model),
    ),
    "tensors of others": (
        "the tensor 'model.norm.weight' is a tests.transformers.test_refusals.Packed",
        lambda p: setattr(p.model.model.norm, "weight", torch.nn.Parameter(Packed(torch.ones(1)))),
    ),
    "rope": (
        "RoPE is dynamic",
        lambda p: setattr(p.model.model.rotary_emb, "rope_type", "dynamic"),
    ),
    "configured rope": (
        "RoPE is longrope",
        lambda p: p.model.config.rope_parameters.update(rope_type="longrope"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_named(processor: Any, case: str) -> None:
    assert cache_refusal(processor, processor.model) is None
    reason, change = REFUSED[case]
    change(processor)
    assert reason in str(cache_refusal(processor, processor.model))


def test_adapters_are_known_by_their_modules(processor: Any) -> None:
    layer = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})(2, 2)
    processor.model.add_module("adapter", layer)
    assert "the model has adapters" in str(cache_refusal(processor, processor.model))


def test_global_hooks_are_named(processor: Any) -> None:
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "global module hooks" in str(cache_refusal(processor, processor.model))
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["search_prefix_match", "free_blocks"])
def test_another_interface_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert interface_refusal() is None
    monkeypatch.setattr(PagedAttentionCache, name, lambda self, something: None)
    known = "this transformers is not as kvshm knows it: PagedAttentionCache"
    assert interface_refusal() == f"{known}.{name}(something)"
    monkeypatch.delattr(PagedAttentionCache, name)
    assert interface_refusal() == f"{known} has no {name}"


def test_a_manager_of_another_shape_is_named() -> None:
    assert "its managers have no _create_batch_processor" in str(
        manager_refusal(SimpleNamespace(batch_processor=None))
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("change", "reason"),
    [(pack, "no parameter or buffer"), (replace_a_class, "MyNorm: neither transformers nor")],
)
def test_a_model_that_can_no_longer_be_compared_shares_no_more(
    manager: MakeManager, lines: Lines, change: Callable[[Any], None], reason: str
) -> None:
    a = manager()
    start(a)
    assert node_of(a) is not None
    with a.pause():
        change(a.model)
    assert node_of(a) is None
    assert any("not sharing the prefix cache" in line and reason in line for line in lines)


@pytest.mark.multiprocess
def test_a_refused_manager_serves_on(node: object, lines: Lines) -> None:
    config = MistralConfig(
        vocab_size=640, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    manager = share(
        model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=16, num_blocks=64, max_batch_tokens=64, return_logprobs=True
            ),
        )
    )
    start(manager)
    assert lines[-1] == (
        "kvshm: not sharing the prefix cache: the model has layers of sliding_attention; only "
        "full_attention is shared"
    )
    assert node_of(manager) is None
    assert len(ask(manager, random_prompt(1, 100))[0]) == 8
    end(manager)


def test_an_older_transformers_is_refused_by_its_version() -> None:
    """Before kvshm imports what that one does not have."""
    code = (
        "import transformers; transformers.__version__ = '5.18.0'\n"
        "try:\n    import kvshm.hooks.transformers\n"
        "except ImportError as exc:\n    print(exc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "transformers 5.18.0 is too old, kvshm needs 5.19 or newer\n"


def test_a_newer_transformers_shares_and_says_once_that_it_is_untested(
    manager: MakeManager, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    managers._note_untested.cache_clear()  # as in a process that has shared nothing yet
    # Of the module that kvshm has imported: transformers may have replaced itself since.
    monkeypatch.setattr(f"{managers.__name__}.transformers.__version__", "5.99.0")
    first, _ = manager(), manager()
    start(first)
    assert node_of(first) is not None
    said = [line for line in lines if "not tested" in line]
    assert said == [
        "kvshm: sharing on transformers 5.99.0, which is not tested with this kvshm; "
        "tested is 5.19 to 5.24"
    ]


def test_the_installed_transformers_is_among_the_tested_and_the_extra_asks_for_the_oldest() -> None:
    assert not untested(transformers.__version__)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, TESTED[0]))
    assert f"transformers>={oldest},<6" in project["optional-dependencies"]["transformers"]
