"""The fingerprint: what must be equal for two engines to exchange raw block bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import sha256

from .ids import Fingerprint

FIELDS: dict[str, str] = {}
"""Each field and the reason for it, causes before their consequences."""


def _field(name: str, reason: str) -> str:
    FIELDS[name] = reason
    return name


KVSHM_ABI = _field(
    "kvshm_abi",
    "Layout of shared memory and version of the protocol: others cannot be read at all.",
)
ENGINE = _field(
    "engine", "Another program, or version of it, may compute, lay out or hash differently."
)
HARDWARE = _field(
    "hardware",
    "Kernels are chosen, and round, by the GPU or the CPU's instruction set. On CPUs also by the "
    "settings of torch's libraries: all variables `ONEDNN_*`, `DNNL_*` and `MKL_*`.",
)
MODEL = _field("model", "The architecture: which computation the weights are for.")
QUANTIZATION = _field("quantization", "Another method computes differently with the same weights.")
DTYPE = _field("dtype", "The number format in which the model computes, however it is written.")
PARALLEL = _field("parallel", "Which part of a block lies on which rank.")
ROPE = _field("rope", "The cache holds keys that are already rotated by their positions.")
MODEL_CONFIG = _field(
    "model_config", "The rest of the model's configuration with all overrides: epsilons, scales."
)
LORA = _field(
    "lora",
    "An engine with adapters runs other kernels, even for requests without one. The adapters "
    "themselves are compared by their contents, request by request.",
)
WEIGHTS = _field(
    "weights",
    "Digest of every parameter and buffer (FP8 scales of the cache are among them), and of the "
    "modules' classes and floats, such as epsilons.",
)
EXPERTS = _field(
    "experts",
    "Digest of all experts of a mixture, on whichever ranks they lie: a block depends on every one "
    "of them. `weights` leaves them out. `none` without experts.",
)
KV_DTYPE = _field("kv_dtype", "What a block's bytes mean, however it is written.")
MAX_MODEL_LEN = _field(
    "max_model_len",
    "Counts if the model's code reads it (dynamic and long RoPE among others). If not, it is "
    "`any`: it changes nothing before the context ends.",
)
SPECULATIVE = _field(
    "speculative",
    "The layers of a draft model have a part in each block: its configuration and how it computes "
    "count (format of its KV cache, kernels, how many tokens it drafts and reads), not its path, "
    "nor which drafts are accepted. Drafting without a model (ngram, suffix) changes no block and "
    "counts as `off`.",
)
MULTIMODAL = _field(
    "multimodal",
    "How images and other items are encoded; with `KVSHM_TRUST_ITEM_IDS` also the model's path, "
    "because identifiers do not cover how an item is preprocessed.",
)
BLOCK_SIZE = _field("block_size", "How many tokens a block and a hash cover.")
BATCH_INVARIANT = _field(
    "batch_invariant", "Such an engine promises a rounding that others do not keep."
)
TRANSPORT = _field(
    "transport", "How blocks travel: memory that one transport exports, another cannot open."
)
ATTENTION = _field(
    "attention", "The backend that writes the blocks: the order of bytes in them, and rounding."
)
EXECUTION = _field(
    "execution",
    "Eager or compiled, custom operators, choice of kernels: fused operators keep more "
    "precision between them, so that every block differs in its last bits.",
)
LAYOUT = _field("layout", "How vLLM orders layers, blocks and heads in the cache.")
KERNEL_BLOCKS = _field(
    "kernel_blocks", "Into how many of the kernels' blocks one of the scheduler's is divided."
)
LAYERS = _field("layers", "Which layers have a part in a block, in which order and shape.")
HASH_ALGORITHM = _field("hash_algorithm", "Another algorithm gives equal tokens another key.")
NONE_HASH = _field(
    "none_hash", "The hash before the first block (PYTHONHASHSEED): all keys depend on it."
)

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
    """Return field -> (its value in ``a``, in ``b``) where they differ, most telling first."""
    unknown = sorted((a.keys() | b.keys()).difference(FIELDS))
    names = (name for name in (*FIELDS, *unknown) if a.get(name) != b.get(name))
    return {name: (a.get(name, ""), b.get(name, "")) for name in names}
