"""Managers of transformers' continuous batching in the test's own process."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from kvshm.hooks.transformers import node_of

from ..waiting import until

PAGE_SIZE = 16
VOCABULARY = 600


def new_manager(model_path: Path, generation: dict[str, Any] | None = None, **config: Any) -> Any:
    """Make a manager that shares nothing yet, with a model of its own.  ``config``: fields of the
    ContinuousBatchingConfig."""
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype="bfloat16", attn_implementation="sdpa"
    )
    return manager_of(model, generation, **config)


def manager_of(model: Any, generation: dict[str, Any] | None = None, **config: Any) -> Any:
    """Make a manager of this model that shares nothing yet."""
    usual = {"page_size": PAGE_SIZE, "num_blocks": 64, "max_batch_tokens": 256}
    return model.init_continuous_batching(
        generation_config=GenerationConfig(
            **{"do_sample": False, "eos_token_id": -1, **(generation or {})}
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **{**usual, "return_logprobs": True, **config}
        ),
    )


def start(*managers: Any) -> None:
    for manager in managers:
        manager.warmup()
        manager.start()
    know_each_other(*managers)


def know_each_other(*managers: Any) -> None:
    nodes = [node for manager in managers if (node := node_of(manager)) is not None]
    for node in nodes:
        until(lambda node=node: node.joined, f"{node} joins")
        until(lambda node=node: node.stats()["peers"] >= len(nodes) - 1, f"{node} knows the others")


def end(manager: Any) -> None:
    if manager.is_running() and manager._generation_thread is not threading.current_thread():
        manager.stop(hard_stop=True, timeout=60)
    cache = getattr(manager.batch_processor, "cache", None)
    if (prefixes := getattr(cache, "prefixes", None)) is not None:
        prefixes.close()


def random_prompt(seed: int, tokens: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(VOCABULARY) for _ in range(tokens)]


def ask(manager: Any, prompt: list[int], tokens: int = 8) -> tuple[list[int], list[float]]:
    manager.add_request(prompt, max_new_tokens=tokens)
    while (output := manager.get_result(timeout=1)) is None:
        assert manager.is_running(), manager.background_thread_status.fatal_error
    assert output.error is None
    return output.generated_tokens, output.logprobs


def cache_of(manager: Any) -> Any:
    return manager.batch_processor.cache


def counts(manager: Any) -> Any:
    return cache_of(manager).importer.counts


def heard(manager: Any, prompt: list[int]) -> None:
    node = node_of(manager)
    wanted = node.keys(prompt)[: (len(prompt) - 1) // PAGE_SIZE]
    until(lambda: set(node.contains(wanted)) <= {"own", "peer"}, "the prefix is known")


def change_weights(manager: Any, factor: float = 1.5) -> None:
    with torch.no_grad():
        manager.model.lm_head.weight.mul_(factor)
