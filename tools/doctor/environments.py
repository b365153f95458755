"""Checks of the environments of vLLM's processes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvshm._ground.rundir import choose_run_directory
from kvshm.config import Config
from kvshm.errors import ConfigError

from .facts import EngineProcess, Facts
from .findings import Check, Told, absent, ok, problem, warning

NONE_RUNS = "no process of vLLM with KVSHM_ENABLE=1 runs as this user"


def _settings(facts: Facts) -> Iterator[Told]:
    if not facts.enabled:
        yield absent(NONE_RUNS)
    for process, config in facts.enabled:
        if isinstance(config, ConfigError):
            yield problem(f"process {process.pid}: {config}", "correct it and restart the engine")
        elif config.warnings:
            for said in config.warnings:
                yield warning(
                    f"process {process.pid}: {said}", "do what it says; restart the engine"
                )
        else:
            yield ok(f"process {process.pid}: no setting is wrong or misspelt")


def _elsewhere(facts: Facts) -> Iterator[Told]:
    """Engines that this command does not show, because they look elsewhere."""
    places = Counter[tuple[str, str]]()
    for process, config in facts.enabled:
        if not isinstance(config, Config):
            continue
        run_dir = choose_run_directory(config.run_dir, process.environ)
        places[str(run_dir), config.namespace] += 1
        if Path(run_dir) != facts.run_dir:
            remedy = "give all engines one KVSHM_RUN_DIR, or look there with --run-dir"
            yield warning(f"process {process.pid} uses another run directory: {run_dir}", remedy)
        elif facts.namespace not in (None, config.namespace):
            remedy = "give all engines one KVSHM_NAMESPACE, or look there with --namespace"
            yield warning(
                f"process {process.pid} uses another namespace: {config.namespace}", remedy
            )
    if not facts.enabled:
        yield absent(NONE_RUNS)
    elif set(places) <= {(str(facts.run_dir), name) for _, name in places}:
        yield ok(f"the processes of vLLM that run as this user look in {facts.run_dir}")


def _users(facts: Facts) -> Iterator[Told]:
    others = [process for process in facts.processes if process.uid != os.geteuid()]
    if not others:
        yield ok("no other user runs vLLM here")
    for uid in sorted({process.uid for process in others}):
        pids = [str(process.pid) for process in others if process.uid == uid]
        remedy = "run all engines that are to share as one user"
        yield warning(f"uid {uid} runs vLLM, too (process {pids[0]}): not looked at", remedy)


def _set(facts: Facts, name: str) -> Iterator[tuple[EngineProcess, str]]:
    for process in facts.processes:
        if value := process.environ.get(name):
            yield process, value


def _allocator(facts: Facts) -> Iterator[Told]:
    if not facts.enabled:
        yield absent(NONE_RUNS)
        return
    found = False
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        for process, value in _set(facts, name):
            if "expandable_segments:true" in value.lower().replace(" ", ""):
                found = True
                remedy = (
                    f"take expandable_segments:True out of {name}: such memory has no IPC handle"
                )
                yield problem(
                    f"process {process.pid}: the KV cache lies in expandable segments", remedy
                )
    if not found:
        yield ok("torch's allocator makes memory that can be exported")


def _hash_seeds(facts: Facts) -> Iterator[Told]:
    """vLLM's hashes of blocks begin with a seed; engines with different ones find nothing."""
    differ = [
        (engine.label, error.text)
        for engine in facts.reading.engines
        for error in engine.errors
        if ": none_hash is " in error.text
    ]
    for label, text in differ:
        remedy = "start all engines with one PYTHONHASHSEED, or with vLLM's default hash"
        yield problem(f"{label}: {text}", remedy)
    if not differ:
        yield ok("no engine's block hashes begin with another seed")


def _front_end(facts: Facts) -> Iterator[Told]:
    rust = [p for p, value in _set(facts, "VLLM_USE_RUST_FRONTEND") if value not in ("0", "false")]
    if not facts.processes:
        yield absent("no process of vLLM runs here")
    elif not rust:
        yield ok("vLLM's front end passes connectors' metrics on")
    for process in rust:
        remedy = "scrape kvshm metrics instead, which needs no front end"
        yield warning(f"process {process.pid} has a front end that drops kvshm's metrics", remedy)


CHECKS = (
    Check("settings", "KVSHM_ variables and VLLM_PLUGINS of vLLM's processes", _settings),
    Check("elsewhere", "engines with another run directory or namespace", _elsewhere),
    Check("users", "engines of other users", _users),
    Check("allocator", "whether torch's allocator makes memory that can be exported", _allocator),
    Check("hash seeds", "whether block hashes begin alike", _hash_seeds),
    Check("front end", "a front end of vLLM that drops connectors' metrics", _front_end),
)
