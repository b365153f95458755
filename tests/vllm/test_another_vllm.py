"""Real engines of a vLLM that nobody has tested: they share if it does the same, and serve as plain
vLLM if not.  What is said of each difference: test_admission.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from local_node import EngineSpec
from sharing_node import observe

from kvshm.hooks.vllm.plugin import OUR_CONNECTOR

from .engines import SharedNode
from .odd_vllm import linked_vllm, rename, with_version
from .oracle import ask_both, assert_bit_equal, prompts, shareable
from .test_refusal_lines import refusal

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

VERSION = "0.99.1"


def before(directory: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment in which Python looks into this folder first."""
    return {"PYTHONPATH": os.pathsep.join([str(directory), environment["PYTHONPATH"]])}


def test_engines_of_a_later_version_share_if_it_does_the_same(model: Path, tmp_path: Path) -> None:
    later = with_version(tmp_path, VERSION)
    with SharedNode() as node:
        node.start_coordinator()
        a, b = node.start_engines(
            EngineSpec("a", model, core=0, environment=later),
            EngineSpec("b", model, core=1, environment=later),
        )
        for engine in (a, b):
            (line,) = engine.said("is not among the tested")
            assert f"kvshm: vLLM {VERSION} " in line
        sent = list(prompts(1, seed=871))
        with observe(node, b) as seen:
            assert_bit_equal(ask_both(node, a, b, sent))
        seen.assert_imported(sum(map(shareable, sent)))


def test_an_engine_of_one_that_does_not_serves_unshared(model: Path, tmp_path: Path) -> None:
    """Also if its user names kvshm's connector, which imports what has been renamed here."""
    changed = linked_vllm(tmp_path / "changed")
    rename(changed, "SupportsHMA", "SupportsHybrid")
    environment = before(changed.parent, with_version(tmp_path, VERSION))
    with SharedNode() as node:
        node.start_coordinator()
        named = ("--kv-transfer-config", json.dumps(OUR_CONNECTOR))
        (engine,) = node.start_engines(
            EngineSpec("a", model, core=0, environment=environment, arguments=named)
        )
        (prompt,) = prompts(1, seed=872)
        assert len(engine.complete(prompt).tokens) == 16
        line = engine.said("not sharing the prefix cache")[-1]
        assert f"vLLM {VERSION} is not as the tested" in line
        assert "VllmConfig.__post_init__ in vllm/config/vllm.py (fact " in line
        assert node.sockets() == []


def test_one_that_is_half_installed_is_named_as_such(model: Path, tmp_path: Path) -> None:
    half = linked_vllm(tmp_path / "half")
    (half / "v1/worker/gpu/model_runner.py").unlink()  # which no engine on a CPU imports
    said = refusal(model, {"PYTHONPATH": str(half.parent)})
    assert "is incomplete, without vllm/v1/worker/gpu/model_runner.py: install vLLM again" in said
