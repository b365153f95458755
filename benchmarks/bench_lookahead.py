"""What a connector of any kind costs an engine that drafts with EAGLE or MTP: look-ahead hashes.

    PYTHONPATH=examples:. .venv-0.33/bin/python benchmarks/bench_lookahead.py

From 0.33 on vLLM hashes a block together with the token behind it where a drafter reads that token
(EAGLE, MTP), so that a hit may end with its last block.  With a connector it does not, and drops
the last block of every hit, as all earlier versions do.  Two of vLLM's own schedulers, one with
kvshm and one without, take the turns of the same conversations (no engine, no model: what is
counted are tokens, and the same on every machine).  A JSON line for each kind of KV cache: tokens
that each turn after the first computes, without and with a connector.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["KVSHM_STRICT"] = "1"

from measurement import percentiles, report
from tiny_model import write_model
from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from tests.vllm.scheduling import (
    BLOCK_SIZE,
    DrivenEngine,
    full,
    imagined_cache,
    vllm_config,
    window,
)

CONVERSATIONS, TURNS = 20, 6
ASKED, ANSWERED = (40, 400), 30
"""Tokens of a question, and of its answer."""
KINDS = {"full attention": [full()], "full and windowed": [full(), window(128)]}
NUM_BLOCKS = 4096


def main() -> int:
    if not hasattr(VllmConfig, "num_hash_lookahead_tokens"):
        print("this vLLM has no look-ahead hashes: 0.33 is the first that has")
        return 1
    run_dir = Path(tempfile.mkdtemp(prefix="kv-"))
    os.environ |= {"KVSHM_RUN_DIR": str(run_dir), "KVSHM_NAMESPACE": run_dir.name.lower()}
    os.environ["KVSHM_JOIN_WAIT_MS"] = "0"
    try:
        model = write_model(run_dir / "model")
        for kind, specs in KINDS.items():
            without, with_kvshm = (computed(model, specs, shares) for shares in (False, True))
            report(
                "look-ahead hashes", kind=kind, block_tokens=BLOCK_SIZE, turns=len(without),
                computed_without_connector=percentiles(without),
                computed_with_connector=percentiles(with_kvshm),
                more_per_turn=round((sum(with_kvshm) - sum(without)) / len(without), 2),
            )  # fmt: skip
    finally:
        shutil.rmtree(run_dir)
    return 0


def computed(model: Path, specs: Sequence[Any], shares: bool) -> list[float]:
    """Tokens that a scheduler has computed of each turn but the first."""
    e = engine(model, specs, shares)
    numbers, found = random.Random(1), []
    for conversation in range(CONVERSATIONS):
        said: list[int] = []
        for turn in range(TURNS):
            said += [numbers.randrange(1000) for _ in range(numbers.randint(*ASKED))]
            request = e.add(f"{conversation}-{turn}", said, max_tokens=ANSWERED)
            first = 0
            while not request.is_finished():
                asked = request.num_output_tokens == 0
                sent = e.schedule()
                tokens = sent.output.num_scheduled_tokens[request.request_id]
                if shares:
                    e.run(sent)
                else:
                    e.answer(sent, None)
                first += tokens if asked else 0
            found += [float(first)] if turn else []
            said = list(request.all_token_ids)
    if shares:
        e.close()
    return found


def engine(model: Path, specs: Sequence[Any], shares: bool) -> DrivenEngine:
    drafter = {"method": "eagle", "model": str(model), "num_speculative_tokens": 2}
    config = vllm_config(
        model, speculative_config=drafter, max_model_len=4096, max_num_batched_tokens=4096
    )
    config.scheduler_config.async_scheduling = False
    if not shares:
        config.kv_transfer_config = None
    made = DrivenEngine(config, NUM_BLOCKS, shares=shares, cache=imagined_cache(NUM_BLOCKS, specs))
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    made.hasher = get_request_block_hasher(
        BLOCK_SIZE, hash_fn, num_hash_lookahead_tokens=config.num_hash_lookahead_tokens
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
