"""Managers share only if they compute the same; whatever may differ has a part in who they are."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import numpy as np
import torch

from kvshm.hooks.cpu_kernels import cpu_kernels
from kvshm.hooks.transformers import node_of
from kvshm.hooks.transformers.identity import identity_of

from .conftest import MakeManager
from .managers import new_manager, start


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Any:
    return new_manager(model_path)


@pytest.fixture
def fresh(model_path: Path) -> Any:
    return new_manager(model_path)


def who(manager: Any) -> Any:
    return identity_of(manager.model, manager.continuous_batching_config)


def flip_a_bit(manager: Any) -> None:
    with torch.no_grad():
        weight = manager.model.model.layers[2].mlp.up_proj.weight
        weight.view(torch.int16)[3, 3] ^= 1


def attend_by_itself(manager: Any) -> None:
    attention = manager.model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"


CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "one bit of a weight": ("weights", flip_a_bit),
    "another number format": ("dtype", lambda m: m.model.to(torch.float32)),
    "another kernel": ("attention", lambda m: m.model.set_attn_implementation("eager")),
    "another epsilon": ("model_config", lambda m: setattr(m.model.config, "rms_norm_eps", 0.1)),
    "another activation": (
        "modules",
        lambda m: setattr(m.model.model.layers[0].mlp, "act_fn", torch.nn.GELU()),
    ),
    "another scale": (
        "modules",
        lambda m: setattr(m.model.model.layers[0].self_attn, "scaling", 0.5),
    ),
    "one layer's attention": ("modules", attend_by_itself),
    "a function that a part holds": (
        "modules",
        lambda m: setattr(m.model.model.rotary_emb, "rope_init_fn", torch.tanh),
    ),
    "another way to compute experts": (
        "modules",
        lambda m: setattr(m.model.config, "_experts_implementation", "batched_mm"),
    ),
    "a compiled model": (
        "execution",
        lambda m: setattr(m.continuous_batching_config, "varlen_compile_config", Compiled()),
    ),
}


class Compiled:
    def to_dict(self) -> dict[str, str]:
        return {"mode": "default"}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows_in_its_field(plain: Any, fresh: Any, change: str) -> None:
    field, act = CHANGES[change]
    assert who(plain) == who(fresh)
    act(fresh)
    usual, unusual = dataclasses.asdict(who(plain)), dataclasses.asdict(who(fresh))
    reported, tells = ({**each, **each["settings"]} for each in (usual, unusual))
    assert reported[field] != tells[field]


@pytest.fixture
def without_mkldnn() -> Iterator[None]:
    torch.backends.mkldnn.enabled = False
    yield
    torch.backends.mkldnn.enabled = True


def test_a_switch_of_torch_shows(plain: Any, without_mkldnn: None) -> None:
    assert "mkldnn False" in who(plain).settings["kernels"]


def test_values_of_a_configuration_that_are_not_json_are_compared(plain: Any, fresh: Any) -> None:
    reported = []
    for value in (1, 2):
        fresh.model.config.my_scale = np.float32(value)
        reported.append(who(fresh).settings["model_config"])
    assert reported[0] != reported[1]


def test_kernels_of_attention_that_are_off_show(plain: Any) -> None:
    usual = who(plain)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert who(plain) != usual
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR"])
def test_settings_of_torchs_libraries_show(
    plain: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    reported = [who(plain).settings["kernels"]]
    for value in ("AVX2", "COMPATIBLE"):
        monkeypatch.setenv(name, value)
        reported.append(who(plain).settings["kernels"])
    assert len(set(reported)) == 3
    assert f"{name}=COMPATIBLE" in reported[-1]


def test_both_interfaces_to_the_precision_of_float32_can_be_read(plain: Any) -> None:
    usual = who(plain)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert who(plain) != usual
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_another_process_computes_the_same(plain: Any, model_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from tests.transformers.managers import new_manager\n"
        "from kvshm.hooks.transformers.identity import identity_of\n"
        f"manager = new_manager(pathlib.Path({str(model_path)!r}))\n"
        "print(identity_of(manager.model, manager.continuous_batching_config))"
    )
    root = Path(__file__).parents[2]
    reported = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=root,
    )  # fmt: skip
    assert reported.stdout.strip() == str(who(plain))


@pytest.mark.multiprocess
@pytest.mark.parametrize("value", ["x" * 100_000, os.fsdecode(b"\xff"), "a b"])
def test_a_variable_of_any_contents_counts_and_can_be_sent(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MKL_OTHER", value)
    a = manager()
    start(a)
    assert node_of(a).joined
    reported = who(a).settings["kernels"]
    monkeypatch.setenv("MKL_OTHER", f"{value} ")
    assert who(a).settings["kernels"] != reported


def test_variables_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_kernels({"MKL_A": "1 MKL_B=2"}) != cpu_kernels({"MKL_A": "1", "MKL_B": "2"})
