"""The fingerprint: what must be equal for two engines to exchange raw block bytes.

It is a digest over named fields.  The digest decides; the fields travel beside it, so that
two engines that cannot share can say why not.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import sha256

from .terms import Fingerprint

KVSHM_ABI = "kvshm_abi"
VLLM_VERSION = "vllm_version"
MODEL = "model"
MODEL_CONFIG = "model_config"
ROPE = "rope"
WEIGHTS = "weights"
QUANTIZATION = "quantization"
DTYPE = "dtype"
KV_DTYPE = "kv_dtype"
MAX_MODEL_LEN = "max_model_len"
LORA = "lora"
SPECULATIVE = "speculative"
MULTIMODAL = "multimodal"
BLOCK_SIZE = "block_size"
LAYOUT = "layout"
KERNEL_BLOCKS = "kernel_blocks"
LAYERS = "layers"
ATTENTION = "attention"
HARDWARE = "hardware"
PARALLEL = "parallel"
BATCH_INVARIANT = "batch_invariant"
HASH_ALGORITHM = "hash_algorithm"
NONE_HASH = "none_hash"

FIELDS = (
    KVSHM_ABI,
    VLLM_VERSION,
    HARDWARE,
    MODEL,
    QUANTIZATION,
    DTYPE,
    PARALLEL,
    ROPE,
    MODEL_CONFIG,
    WEIGHTS,
    KV_DTYPE,
    MAX_MODEL_LEN,
    LORA,
    SPECULATIVE,
    MULTIMODAL,
    BLOCK_SIZE,
    BATCH_INVARIANT,
    ATTENTION,
    LAYOUT,
    KERNEL_BLOCKS,
    LAYERS,
    HASH_ALGORITHM,
    NONE_HASH,
)
"""Causes before their consequences: the first field that differs tells the most."""

_LENGTH = struct.Struct("<I")


def fingerprint(fields: Mapping[str, str]) -> Fingerprint:
    """Return the digest of the fields, whatever their order."""
    digest = sha256()
    for name in sorted(fields):
        for text in (name, fields[name]):
            data = text.encode()
            # The length keeps ("ab", "c") and ("a", "bc") apart.
            digest.update(_LENGTH.pack(len(data)) + data)
    return Fingerprint(digest.digest())


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return field -> (its value in ``a``, in ``b``) where they differ, most telling first;
    "" stands for a field that one side does not know."""
    unknown = sorted((a.keys() | b.keys()).difference(FIELDS))
    names = (name for name in (*FIELDS, *unknown) if a.get(name) != b.get(name))
    return {name: (a.get(name, ""), b.get(name, "")) for name in names}
