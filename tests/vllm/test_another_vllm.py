"""Real engines of a vLLM that no one has tested: they share if it does the same, and serve as plain
vLLM if not.  What is said of each difference: test_admission.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from local_node import EngineSpec, clean_environment
from sharing_node import observe

from kvshm.hooks.vllm.transfer_config import OUR_CONNECTOR

from .engines import SharedNode
from .odd_vllm import linked_vllm, rename, with_version
from .oracle import ask_both, assert_bit_equal, prompts, shareable
from .test_refusal_lines import refusal

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

VERSION = "0.99.1"
MAKE = """
from types import SimpleNamespace
import vllm.logger
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from kvshm.hooks.connector import KvshmConnector
from kvshm.hooks.vllm.transfer_config import OUR_CONNECTOR
config = SimpleNamespace(kv_transfer_config=KVTransferConfig(**OUR_CONNECTOR))
made = KvshmConnector(config, KVConnectorRole.SCHEDULER, None)
print(type(made).__name__, made.get_num_new_matched_tokens(None, 0))
"""


def before(directory: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment in which Python looks into this folder first."""
    return {"PYTHONPATH": os.pathsep.join([str(directory), environment["PYTHONPATH"]])}


@pytest.mark.nightly  # test_incompatible.py starts one; test_admission.py decides
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


@pytest.mark.nightly  # what follows makes the connector of such a vLLM, without an engine
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


def no_peer_source(changed: Path) -> None:
    rename(changed, "P2P", "PEER")


def one_more_duty(changed: Path) -> None:
    """Every connector has to have a method that no version asks for today."""
    path = changed / "distributed/kv_transfer/kv_connector/v1/base.py"
    text = path.read_text()
    wanted = "    @abstractmethod\n    def build_connector_meta("
    assert wanted in text
    path.unlink()
    duty = "    @abstractmethod\n    def new_duty(self): ...\n\n"
    path.write_text(text.replace(wanted, duty + wanted))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_peer_source, "this vLLM is not as kvshm knows it: AttributeError: .*P2P"),
        (one_more_duty, "this vLLM requires connectors to have new_duty"),
    ],
)
def test_where_the_connector_cannot_be_made_another_takes_its_name(
    tmp_path: Path, change: Callable[[Path], None], why: str
) -> None:
    """Although each fact holds.  vLLM makes it of a configuration that names it, so it must be a
    connector, and complete."""
    changed = linked_vllm(tmp_path / "changed")
    change(changed)
    environ = clean_environment() | before(changed.parent, with_version(tmp_path, VERSION))
    done = subprocess.run(
        [sys.executable, "-c", MAKE], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["KvshmConnector", "(0,", "False)"], done.stderr
    assert len(re.findall(f"not sharing the prefix cache: {why}", done.stderr)) == 1


def test_one_that_is_half_installed_is_named_as_such(model: Path, tmp_path: Path) -> None:
    half = linked_vllm(tmp_path / "half")
    (half / "v1/worker/gpu/model_runner.py").unlink()  # which no engine on a CPU imports
    said = refusal(model, {"PYTHONPATH": str(half.parent)})
    assert "is incomplete, without vllm/v1/worker/gpu/model_runner.py: install vLLM again" in said
