"""vLLM offline, as a script of its own: ``LLM()``, enabled in one of the two ways."""

from __future__ import annotations

import json
import sys


def main(model: str, way: str) -> None:
    from vllm import LLM, SamplingParams

    official = {
        "kv_connector": "KvshmConnector",
        "kv_connector_module_path": "kvshm.hooks.connector",
        "kv_role": "kv_both",
    }
    llm = LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=8192,
        num_gpu_blocks_override=512,
        **({"kv_transfer_config": official} if way == "argument" else {}),
    )
    greedy = SamplingParams(temperature=0, seed=1, ignore_eos=True, max_tokens=16)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        (answer,) = llm.generate([{"prompt_token_ids": json.loads(line)}], greedy, use_tqdm=False)
        said = {"cached": answer.num_cached_tokens, "tokens": answer.outputs[0].token_ids}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
