"""Try a vLLM that was put together from parts: how far does it get on this machine?

    PYTHONPATH=dist/gpu-vllm-site:examples python benchmarks/gpu_vllm_trial.py

Prints one line for each step that went well; an exception ends it.  Without a GPU it ends after
the import of what needs none.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from local_node import offline, sampler

TOKENS = 8


def main() -> None:
    os.environ |= {**offline(), **sampler(), "KVSHM_ENABLE": "0"}
    import torch
    import vllm
    import vllm._C_stable_libtorch

    kernels = [torch.ops._C.silu_and_mul, torch.ops._C.rms_norm]
    print(f"vLLM {vllm.__version__} over torch {torch.__version__}: {len(kernels)} kernels found")
    import vllm.entrypoints.openai.api_server

    from kvshm.hooks.vllm.connector import KvshmConnector

    print(f"the API server and {KvshmConnector.__name__} can be imported")
    if not torch.cuda.is_available():
        print("no GPU: no engine was started")
        return
    import vllm.vllm_flash_attn

    print(f"FlashAttention 3: {torch.ops._vllm_fa3_C.fwd}")
    one_engine()


def one_engine() -> None:
    """Answer one prompt with a tiny model of random weights."""
    from tiny_model import write_model
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        engine = LLM(
            str(write_model(Path(folder))), dtype="bfloat16", enforce_eager=True,
            max_model_len=1024, kv_cache_memory_bytes=256 << 20,
        )  # fmt: skip
        prompt = {"prompt_token_ids": list(range(50, 150))}
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        (answer,) = engine.generate([prompt], sampling)
        tokens = answer.outputs[0].token_ids
        if len(tokens) != TOKENS:
            raise RuntimeError(f"{len(tokens)} of {TOKENS} tokens came")
        print(f"one engine has answered: {list(tokens)}")


if __name__ == "__main__":
    main()
