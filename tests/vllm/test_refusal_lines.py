"""What an operator reads in the server's output: why an engine does not share, once each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from local_node import Engine, EngineSpec, clean_environment, wait_until
from sharing_node import observe

from .conftest import Pair
from .engines import SharedNode
from .oracle import ask_both, assert_bit_equal, prompts, random_prompt, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OFFICIAL = {
    "kv_connector": "KvshmConnector",
    "kv_connector_module_path": "kvshm.hooks.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "fail",
}
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
EXAMPLE = "KVTransferConfig(kv_connector='ExampleConnector', kv_role='kv_both')"
CONFIGURE = """
import os, sys
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
os.environ.update({environ})
for _ in range(2):
    EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, {arguments}).create_engine_config()
"""


def said(engine: Engine, text: str) -> list[str]:
    """Lines of the server's output about this."""
    return [line for line in engine.log().splitlines() if text in line]


# -- no engine comes up: these end, or are done, before a model is loaded


@pytest.mark.parametrize("way", ["environment", "official"])
def test_a_bad_setting_stops_the_start_with_the_remedy(
    model: Path, tmp_path: Path, way: str
) -> None:
    official = ("--kv-transfer-config", json.dumps(OFFICIAL)) if way == "official" else ()
    environment = {"KVSHM_ROLE": "reader"} | ({} if official else {"KVSHM_ENABLE": "1"})
    spec = EngineSpec("bad", model, core=0, arguments=official)
    engine = Engine(spec, environment, tmp_path / "log")
    assert engine.process.wait(120) != 0
    wanted = "KVSHM_ROLE='reader' is not both, producer or consumer; correct it, or unset it"
    assert wanted in said(engine, "ConfigError")[-1]
    assert not said(engine, "Initializing a V1 LLM engine")


@pytest.mark.parametrize(
    ("arguments", "environ", "reason"),
    [
        ("enable_prefix_caching=False", {}, "prefix caching is off (--no-enable-prefix-caching)"),
        ("runner='pooling'", {}, "the model is a pooling model"),
        ("", ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"),
        (f"kv_transfer_config={EXAMPLE}", {}, "kv_transfer_config names ExampleConnector"),
    ],
    ids=["no-prefix-caching", "pooling", "expandable-segments", "other-connector"],
)
def test_a_refusal_is_one_line_of_vllms_log(
    model: Path, arguments: str, environ: dict[str, str], reason: str
) -> None:
    code = CONFIGURE.format(arguments=arguments, environ=environ)
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        env={**clean_environment(), "KVSHM_ENABLE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "sharing the" in line]
    assert f"not sharing the prefix cache: {reason}" in line
    assert "WARNING" in line


# -- engines that come up and serve


def test_an_engine_that_is_refused_serves(model: Path) -> None:
    with SharedNode({"KVSHM_NAMSPACE": "x", "KVSHM_PORT": "tcp://10.0.0.1:1"}) as node:
        (engine,) = node.start_engines(
            EngineSpec("no-cache", model, 0, arguments=("--no-enable-prefix-caching",))
        )
        assert engine.complete(random_prompt(300, 200)).tokens
        (line,) = said(engine, "not sharing the prefix cache")
        assert "prefix caching is off (--no-enable-prefix-caching)" in line
        (line,) = said(engine, "did you mean KVSHM_NAMESPACE?")
        assert "KVSHM_NAMSPACE is no setting" in line
        assert not said(engine, "KVSHM_PORT")
        assert node.segments() == []


def test_priority_scheduling_imports_only_and_the_policy_is_overridden(pair: Pair) -> None:
    arguments = ("--kv-transfer-config", json.dumps(OFFICIAL), "--scheduling-policy", "priority")
    settings = {"KVSHM_ENABLE": "", "KVSHM_ROL": "both"}
    spec = EngineSpec("priority", pair.a.spec.model, 1, arguments=arguments, environment=settings)
    (engine,) = pair.node.start_engines(spec)
    pair.node.wait_joined(pair.a, engine)
    sent = list(prompts(1, seed=301))
    with observe(pair.node, engine) as seen:
        assert_bit_equal(ask_both(pair.node, pair.a, engine, sent))
    seen.assert_imported(shareable(sent[0]))
    assert pair.node.shown(engine) == set()
    assert len(said(engine, "importing only: priority scheduling")) == 1
    assert len(said(engine, "kv_load_failure_policy=fail overridden with recompute")) == 1
    assert len(said(engine, "did you mean KVSHM_ROLE?")) == 1
    pair.node.stop_engines(engine)


def test_both_sides_and_the_dump_name_what_differs(pair: Pair) -> None:
    """Engines that hash otherwise, one in the roster for long and one new: each names both
    values, its own first."""
    arguments = ("--prefix-caching-hash-algo", "sha256_cbor")
    spec = EngineSpec("stranger", pair.a.spec.model, 1, arguments=arguments)
    (stranger,) = pair.node.start_engines(spec)
    for one, ours, theirs in (
        (stranger, "sha256_cbor", "sha256"),
        (pair.a, "sha256", "sha256_cbor"),
        (pair.b, "sha256", "sha256_cbor"),
    ):
        wanted = f"hash_algorithm differs ({ours} here, {theirs} there)"
        for _ in wait_until(f"{one!r} says {wanted!r}", 30):
            if lines := said(one, wanted):
                break
        assert len(lines) == (2 if one is stranger else 1)
        assert all("cannot share with this one" in line for line in lines)
    dump = pair.node.dump()
    assert "hash_algorithm is sha256 here, sha256_cbor there" in dump
    assert "hash_algorithm is sha256_cbor here, sha256 there" in dump
    pair.node.stop_engines(stranger)


def test_a_request_stays_out_by_what_its_client_says(pair: Pair) -> None:
    unshared, shared = random_prompt(302, 400), random_prompt(303, 400)
    before = pair.node.shown(pair.a)
    pair.a.complete(unshared, kv_transfer_params={"kvshm": {"share": False}})
    with pair.node.sharing(pair.a, shareable(shared)):
        pair.a.complete(shared)
    assert len(pair.node.shown(pair.a) - before) == shareable(shared)
    tokens = pair.b.prompt_tokens()
    pair.b.complete(shared, kv_transfer_params={"kvshm": {"share": False}})
    assert (pair.b.prompt_tokens() - tokens).imported == 0
