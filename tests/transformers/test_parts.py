"""What a model computes with is from transformers and torch, or it is refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch.ao.quantization import QuantStub
from torch.nn.utils.parametrizations import weight_norm
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from kvshm.hooks.transformers.parts import CannotCompareError, words_of

from .managers import new_manager


@pytest.fixture
def model(model_path: Path) -> Any:
    return new_manager(model_path).model


def attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


class Scaled(llama.LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, *more = super().forward(*args, **kwargs)
        return (output * 2, *more)


class Doubler:
    def __call__(self, x: Any) -> Any:
        return 2 * x


def own(x: Any) -> Any:
    return x


ODD_PARTS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "class": (
        "'model.layers.1.self_attn' is a tests.transformers.test_parts.Scaled: neither",
        lambda m: setattr(attention(m), "__class__", Scaled),
    ),
    "class with a name of transformers": (
        "is a transformers.models.llama.modeling_llama.LlamaAttention: neither",
        lambda m: setattr(
            attention(m),
            "__class__",
            type("LlamaAttention", (llama.LlamaAttention,), {"__module__": llama.__name__}),
        ),
    ),
    "parametrization": (
        "is a torch.nn.utils.parametrize.ParametrizedLinear: neither",
        lambda m: weight_norm(m.model.layers[0].mlp.gate_proj),
    ),
    "packed weights": (
        "'quantize' is a torch.ao.quantization.stubs.QuantStub: neither",
        lambda m: m.add_module("quantize", QuantStub()),
    ),
    "held function": (
        "'act' of the model's part 'model.layers.1.self_attn' is a function",
        lambda m: setattr(attention(m), "act", own),
    ),
    "held lambda in a list": (
        "'acts' of the model's part 'model.layers.1.self_attn' is a function",
        lambda m: setattr(attention(m), "acts", [(torch.tanh, lambda x: x)]),
    ),
    "held function with arguments": (
        "'act' of the model's part 'model.layers.1.self_attn' is a function",
        lambda m: setattr(attention(m), "act", functools.partial(own, 1)),
    ),
    "held object": (
        "'k' of the model's part 'model.layers.1.self_attn' is a fractions.Fraction",
        lambda m: setattr(attention(m), "k", Fraction(1, 3)),
    ),
    "hidden module": (
        "'hidden' of the model's part 'model.layers.1.self_attn' is a torch.nn",
        lambda m: setattr(attention(m), "hidden", [torch.nn.Linear(1, 1)]),
    ),
    "method of something": (
        "'act' of the model's part 'model.layers.1.self_attn' is a builtins.method",
        lambda m: setattr(attention(m), "act", torch.nn.Linear(1, 1).forward),
    ),
}


@pytest.mark.parametrize("case", ODD_PARTS)
def test_a_part_that_a_program_wrote_itself_is_named(model: Any, case: str) -> None:
    list(words_of(model))
    reason, change = ODD_PARTS[case]
    change(model)
    with pytest.raises(CannotCompareError, match="cannot be compared") as reported:
        list(words_of(model))
    assert reason in str(reported.value)


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


REPLACED: dict[str, tuple[Any, str, Any]] = {
    "forward": (llama.LlamaMLP, "forward", lambda self, x: x),
    "method of a base": (torch.nn.Module, "_call_impl", own),
    "method of transformers, wrapped": (
        llama.LlamaMLP,
        "forward",
        wrapped(llama.LlamaMLP.forward),
    ),
    "method of theirs around another": (llama.LlamaMLP, "forward", torch.no_grad()(own)),
    "object as a method": (llama.LlamaMLP, "forward", Doubler()),
    "property": (llama.LlamaModel, "device", property(own)),
    "function": (llama, "apply_rotary_pos_emb", wrapped(llama.apply_rotary_pos_emb)),
    "function with arguments": (
        llama,
        "rotate_half",
        functools.partial(llama.rotate_half),
    ),
    "object as a function": (llama, "rotate_half", Doubler()),
    "function that attention calls": (sdpa_attention, "repeat_kv", own),
    "function of torch": (torch.nn.functional, "silu", own),
}


@pytest.mark.parametrize("case", REPLACED)
def test_a_replaced_function_is_named(
    model: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    list(words_of(model))
    owner, name, function = REPLACED[case]
    monkeypatch.setattr(owner, name, function)
    with pytest.raises(CannotCompareError, match=rf"{name} is a function that is not from"):
        list(words_of(model))


def test_what_transformers_imports_from_accelerate_does_not_count(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is installed, as beside most transformers."""
    usual = repr(list(words_of(model)))
    found: dict[str, Any] = {"__name__": "accelerate.hooks"}
    exec("def add_hook_to_module(module, hook): ...", found)
    monkeypatch.setattr(llama, "add_hook_to_module", found["add_hook_to_module"], raising=False)
    assert repr(list(words_of(model))) == usual


@pytest.mark.parametrize("function", [own, Doubler(), functools.partial(own)])
@pytest.mark.parametrize("way", ["sdpa", "paged|eager"])
def test_a_function_of_attention_that_a_program_registers_is_named(
    model: Any, way: str, function: Any
) -> None:
    model.set_attn_implementation(way.removeprefix("paged|"))
    before = ALL_ATTENTION_FUNCTIONS[way]
    ALL_ATTENTION_FUNCTIONS.register(way, function)
    try:
        with pytest.raises(CannotCompareError, match=r"ALL_ATTENTION_FUNCTIONS\['"):
            list(words_of(model))
    finally:
        ALL_ATTENTION_FUNCTIONS.register(way, before)
    list(words_of(model))


def test_a_compiled_function_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(llama.rotate_half)
    monkeypatch.setattr(llama, "rotate_half", compiled)
    with pytest.raises(CannotCompareError, match="rotate_half is compiled by torch"):
        list(words_of(model))


OTHER_WORDS: dict[str, Callable[[Any], object]] = {
    "list": lambda m: setattr(attention(m), "scales", [1, 2]),
    "another list": lambda m: setattr(attention(m), "scales", [1, 3]),
    "dict": lambda m: setattr(attention(m), "scales", {"k": (1, None)}),
    "set": lambda m: setattr(attention(m), "scales", {1, 2}),
    "private": lambda m: setattr(attention(m), "_scale", 2.0),
    "tensor": lambda m: setattr(attention(m), "scales", torch.ones(3)),
    "another tensor": lambda m: setattr(attention(m), "scales", torch.full((3,), 2.0)),
    "tensor in a list": lambda m: setattr(attention(m), "scales", [torch.ones(3)]),
    "another tensor in a list": lambda m: setattr(attention(m), "scales", [torch.zeros(3)]),
    "format": lambda m: setattr(attention(m), "scales", torch.float16),
    "function of torch": lambda m: setattr(attention(m), "act", torch.nn.functional.gelu),
    "another function of torch": lambda m: setattr(attention(m), "act", torch.tanh),
    "its arguments": lambda m: setattr(
        attention(m), "act", functools.partial(torch.tanh, out=None)
    ),
    "configuration": lambda m: give_config(m, rms_norm_eps=0.1),
    "another configuration": lambda m: give_config(m, rms_norm_eps=0.2),
}


def give_config(model: Any, **values: Any) -> None:
    config = copy.deepcopy(model.config)
    config.update(values)
    attention(model).config = config


def test_attributes_of_all_kinds_are_compared(model: Any) -> None:
    reported = [repr(list(words_of(model)))]
    for change in OTHER_WORDS.values():
        before = dict(vars(attention(model)))
        for _ in range(2):  # the same again: the same words
            change(model)
            reported.append(repr(list(words_of(model))))
            vars(attention(model)).clear()
            vars(attention(model)).update(before)
        assert reported[-1] == reported[-2]
    assert repr(list(words_of(model))) == reported[0]
    assert len(set(reported)) == 1 + len(OTHER_WORDS)


def test_a_function_of_theirs_in_anothers_place_shows(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = repr(list(words_of(model)))
    monkeypatch.setattr(llama, "rotate_half", llama.repeat_kv)
    assert repr(list(words_of(model))) != usual


def test_how_a_model_was_loaded_does_not_count(model: Any) -> None:
    usual = repr(list(words_of(model)))
    model.generation_config.max_length = 7
    model.add_model_tags("mine")
    which = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{which}_checkpointing_enable")()  # transformers 5.23 has renamed it
    getattr(model, f"{which}_checkpointing_disable")()
    assert repr(list(words_of(model))) == usual
