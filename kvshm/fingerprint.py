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
EXECUTION = "execution"
HARDWARE = "hardware"
PARALLEL = "parallel"
BATCH_INVARIANT = "batch_invariant"
HASH_ALGORITHM = "hash_algorithm"
NONE_HASH = "none_hash"

FIELDS = {
    KVSHM_ABI: "Layout of shared memory and version of the protocol: others cannot be read at all.",
    VLLM_VERSION: "Another vLLM may compute, lay out or hash otherwise.",
    HARDWARE: "Kernels are chosen, and round, by the GPU or the CPU's instruction set.",
    MODEL: "The architecture: which computation the weights are for.",
    QUANTIZATION: "Equal weights are used otherwise by another method.",
    DTYPE: "What the model computes in, however it was spelt.",
    PARALLEL: "Which part of a block lies on which rank.",
    ROPE: "Keys are stored with their positions turned in.",
    MODEL_CONFIG: "The rest of the model's configuration with all overrides: epsilons, scales.",
    WEIGHTS: "Digest of every parameter and buffer; FP8 scales of the cache are among them.",
    KV_DTYPE: "What a block's bytes mean, however it was spelt.",
    MAX_MODEL_LEN: "Only where code of the model reads it (dynamic and long RoPE among others), "
    "else `any`: then it changes nothing before the context ends.",
    LORA: "With adapters loaded other kernels run, also for requests that name none.",
    SPECULATIVE: "Draft layers keep their part in the same blocks. Drafting without a model "
    "(ngram, suffix) changes no block and counts as `off`.",
    MULTIMODAL: "Keys of images name the input, not how this model's files preprocess it.",
    BLOCK_SIZE: "How many tokens a block and a hash stand for.",
    BATCH_INVARIANT: "Such an engine promises a rounding that others do not keep.",
    ATTENTION: "The backend that writes the blocks: the order of bytes in them, and rounding.",
    EXECUTION: "Eager or compiled, custom operators, choice of kernels: fused operators keep more "
    "precision between them, so that every block differs in its last bits.",
    LAYOUT: "How vLLM orders layers, blocks and heads in the cache.",
    KERNEL_BLOCKS: "Into how many of the kernels' blocks one of the scheduler's is divided.",
    LAYERS: "Which layers have a part in a block, in which order and shape.",
    HASH_ALGORITHM: "Another algorithm gives equal tokens another key.",
    NONE_HASH: "The hash before the first block (PYTHONHASHSEED): all keys depend on it.",
}
"""Each field and the reason for it.  Causes before their consequences: the first field that
differs tells the most."""

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
