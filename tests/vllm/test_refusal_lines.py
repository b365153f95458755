"""What an operator reads in the server's output: why an engine does not share, once each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from local_node import Engine, EngineSpec, clean_environment

from .engines import SharedNode
from .odd_models import write_encoder_decoder
from .odd_vllm import TOO_OLD, dotted, with_version

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OFFICIAL = {
    "kv_connector": "KvshmConnector",
    "kv_connector_module_path": "kvshm.hooks.connector",
    "kv_role": "kv_both",
}
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
CONFIGURE = """
import sys
from vllm.engine.arg_utils import EngineArgs
for _ in range(2):
    EngineArgs(model=sys.argv[1], skip_tokenizer_init=True).create_engine_config()
"""


# -- no engine comes up: these end, or are done, before a model is loaded


@pytest.mark.long
def test_a_bad_setting_stops_the_start_with_the_remedy(model: Path, tmp_path: Path) -> None:
    """Either way kvshm is enabled."""
    official = ("--kv-transfer-config", json.dumps(OFFICIAL))
    bad, enabled = {"KVSHM_ROLE": "reader"}, {"KVSHM_ENABLE": "1"}
    ways = [
        (EngineSpec("environment", model, core=0), bad | enabled),
        (EngineSpec("argument", model, core=1, arguments=official), bad),
    ]
    engines = [Engine(spec, settings, tmp_path / spec.name) for spec, settings in ways]
    wanted = "KVSHM_ROLE='reader' is not both, producer or consumer; correct it, or unset it"
    try:
        for engine in engines:
            assert engine.process.wait(400) != 0
            assert wanted in engine.said("ConfigError")[-1]
            assert not engine.said("Initializing a V1 LLM engine")
    finally:
        for engine in engines:
            engine.kill()


def refusal(model: Path, environ: dict[str, str] | None = None) -> str:
    """The one line about sharing in what vLLM writes while it makes a configuration, twice."""
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURE, str(model)],
        env={**clean_environment(), "KVSHM_ENABLE": "1", "HF_HUB_OFFLINE": "1", **(environ or {})},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "sharing the" in line]
    return line.rpartition("not sharing the prefix cache: ")[2]


@pytest.mark.long
def test_a_vllm_that_is_too_old_is_named(model: Path, tmp_path: Path) -> None:
    """Said when vLLM loads its plugins, which may be before it has set up its logging."""
    said = refusal(model, with_version(tmp_path, dotted(TOO_OLD)))
    assert said.startswith(f"vLLM {dotted(TOO_OLD)} is too old, kvshm needs ")


def test_an_encoder_decoder_is_named_as_such(tmp_path: Path) -> None:
    """Not what follows from it: vLLM itself turns prefix caching off for these."""
    assert refusal(write_encoder_decoder(tmp_path)) == "the model is an encoder-decoder"


# -- engines that come up and serve


REFUSED = {
    "prefix caching off": "prefix caching is off (--no-enable-prefix-caching)",
    "pooling": "the model is a pooling model",
    "expandable segments": "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, which may move",
    "another connector": "kv_transfer_config names ExampleConnector; KVSHM_BESIDE=1 shares beside",
    "no resets": "the block pool of this vLLM has no of_another_version",
    "no hashes": "the block pool of this vLLM has no of_another_version",
}

Case = tuple[str, dict[str, Any], dict[str, str], str]
"""Name, arguments of LLM(), environment, which needs of kvshm's are not met (pool_watch.py)."""


def refused_cases(model: Path, tmp_path: Path) -> list[Case]:
    llama, storage = {"model": str(model)}, {"shared_storage_path": str(tmp_path / "storage")}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    transfer = {**connector, "kv_connector_extra_config": storage}
    return [
        ("prefix caching off", {**llama, "enable_prefix_caching": False}, {}, ""),
        ("pooling", {**llama, "runner": "pooling"}, {}, ""),
        ("expandable segments", llama, ALLOCATOR, ""),
        ("another connector", {**llama, "kv_transfer_config": transfer}, {}, ""),
        ("no resets", llama, {}, "FOR_SHARING"),
        ("no hashes", llama, {}, "FOR_EXPORT"),
    ]


@pytest.mark.long
def test_refused_engines_serve_and_say_once_why(model: Path, tmp_path: Path) -> None:
    """Real engines, one after the other in one process, which costs one start for all."""
    cases = refused_cases(model, tmp_path)
    strangers = {"KVSHM_NAMSPACE": "x", "KVSHM_PORT": "tcp://10.0.0.1:1"}
    with SharedNode(strangers) as node:
        output = node.run_script("refused_engines.py", json.dumps(cases))
        assert node.sockets() == []
    said = re.split(r'^{"made": "(.*)"}$', output, flags=re.MULTILINE)
    assert said[1::2] == list(REFUSED)
    for name, text in zip(said[1::2], said[2::2], strict=True):
        kind = "importing only" if name == "no hashes" else "not sharing the prefix cache"
        (line,) = [s for s in text.splitlines() if f"{kind}: " in s]
        assert f"{kind}: {REFUSED[name]}" in line
        assert "WARNING" in line
        (answered,) = re.findall(r'^{"answered": (.*)}$', text, re.MULTILINE)
        assert int(answered) == (256 if name == "pooling" else 16)
    (line,) = [s for s in output.splitlines() if "did you mean KVSHM_NAMESPACE?" in s]
    assert "KVSHM_NAMSPACE is not a setting" in line
    assert "KVSHM_PORT" not in output
