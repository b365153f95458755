"""Engines that would compute other bytes, or find them under other keys, share nothing: both
sides and the dump name every field that differs, and both values of the first.

Here for what can differ between two real engines on a CPU; the layout inside a block, of which
vLLM's CPU backend knows one, on vLLM's configuration (test_identity.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from local_node import Engine, EngineSpec, wait_until
from sharing_node import observe

from ..engines_under_test import TransformersSpec
from .conftest import Pair
from .engines import PATIENCE_S, remove_what_vllm_leaves
from .odd_vllm import with_version
from .oracle import prompts, shareable

vllm = pytest.importorskip("vllm")

import torch  # noqa: E402 - after the skip
import transformers  # noqa: E402 - likewise
from vllm.utils.hashing import sha256, sha256_cbor  # noqa: E402 - likewise
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED  # noqa: E402 - likewise

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

USUAL = {
    "engine": f"vllm {vllm.__version__}",
    "dtype": "torch.bfloat16",
    "parallel": "tp 1, pp 1, dcp 1, pcp 1, interleave 1",
    "kv_dtype": "auto",
    "block_size": "128, hashed 128",
    "hash_algorithm": "sha256",
    "none_hash": sha256(DEFAULT_NONE_HASH_SEED).hex(),
}
"""What the session's two engines say of themselves."""


SAID = re.compile(r"cannot share with this one: (\w+) is (.*) here, (.*) there; also ([\w ]*\w)")


def named(one: Engine, differing: dict[str, str], *, itself: bool) -> list[str]:
    """The first field of each line in which an engine names all these, with its own value first."""
    lines = []
    for text in one.log().splitlines():
        if (said := SAID.search(text)) is None:
            continue
        first, *values, others = said.groups()
        wanted = [differing.get(first, values[0]), USUAL.get(first, values[1])]
        named = {first, *others.split()}
        if differing.keys() <= named and values == (wanted if itself else wanted[::-1]):
            lines.append(first)
    return lines


def assert_both_sides_name(
    pair: Pair, other: Engine, differing: dict[str, str], said_by_other: int = 2
) -> None:
    for one, times in ((other, said_by_other), (pair.a, 1), (pair.b, 1)):
        for _ in wait_until(f"{one!r} names {list(differing)}", PATIENCE_S):
            lines = named(one, differing, itself=one is other)
            if len(lines) >= times:
                break
        assert len(lines) == times
    dump, first = pair.node.dump(), lines[0]
    # Of values too long for the error log it shows the part in which they differ.
    usual, unusual = (re.escape(those.get(first, "")[:10]) for those in (USUAL, differing))
    assert re.search(rf"{first} is {usual}.* here, {unusual}.* there", dump), dump
    assert re.search(rf"{first} is {unusual}.* here, {usual}.* there", dump), dump


def assert_shares_nothing(pair: Pair, other: Engine, seed: int) -> None:
    (prompt,) = prompts(1, seed)
    with pair.node.sharing(pair.a, shareable(prompt)):
        pair.a.complete(prompt)
    with observe(pair.node, other) as seen:
        assert len(other.complete(prompt).tokens) == 16
    assert seen.tokens.computed == len(prompt)
    assert (seen.lookups, seen.miss_fingerprint) == (1, 1)


def test_another_vllm_dtype_seed_and_tensor_parallel_size(pair: Pair, tmp_path: Path) -> None:
    spec = EngineSpec(
        "two-ranks",
        pair.a.spec.model,
        core=0,
        arguments=("--tensor-parallel-size", "2", "--dtype", "float32"),
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "PYTHONHASHSEED": "7",
            **with_version(tmp_path, "0.99.1"),
            "KVSHM_UNTESTED": "1",
        },
    )
    (other,) = pair.node.start_engines(spec)
    differing = {
        "engine": "vllm 0.99.1",
        "dtype": "torch.float32",
        "parallel": USUAL["parallel"].replace("tp 1", "tp 2"),
        "none_hash": sha256("7").hex(),
    }
    assert_both_sides_name(pair, other, differing)
    assert_shares_nothing(pair, other, seed=310)
    pair.node.stop_engines(other)
    remove_what_vllm_leaves(other)


def test_an_engine_of_transformers(pair: Pair) -> None:
    """Of the same model, with blocks of as many tokens.  It hears of two engines that differ in the
    same, and of another model as it names models, and says so once."""
    (other,) = pair.node.start_engines(TransformersSpec("transformers", pair.a.spec.model, core=0))
    differing = {"engine": f"transformers {transformers.__version__}"}
    assert_both_sides_name(pair, other, differing, said_by_other=1)
    assert_shares_nothing(pair, other, seed=312)
    pair.node.stop_engines(other)


def test_another_block_size_hash_algorithm_and_kv_dtype(pair: Pair) -> None:
    arguments = ["--block-size", "64", "--prefix-caching-hash-algo", "sha256_cbor"]
    differing = {
        "block_size": "64, hashed 64",
        "hash_algorithm": "sha256_cbor",
        "none_hash": sha256_cbor(DEFAULT_NONE_HASH_SEED).hex(),
    }
    if torch.cpu._is_avx512_supported():  # else vLLM has no other KV dtype on a CPU
        arguments += ["--kv-cache-dtype", "fp8"]
        differing["kv_dtype"] = "fp8_e4m3"
    spec = EngineSpec("incompatible", pair.a.spec.model, core=1, arguments=tuple(arguments))
    (other,) = pair.node.start_engines(spec)
    assert_both_sides_name(pair, other, differing)
    assert_shares_nothing(pair, other, seed=311)
    pair.node.stop_engines(other)
