"""Checks of what engine processes were started with, as /proc shows it to their own user."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from kvshm.config import Config
from kvshm.errors import ConfigError

from .checks import Finding, judged, not_applicable, problem, warning
from .evidence import Evidence
from .place import using_this
from .processes import Process

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
NO_PROCESS = "no process in which kvshm is enabled uses this run directory"


def own_settings(seen: Evidence) -> Finding:
    return _of_all(seen, _refused, "the settings of all engine processes can be used", problem)


def _refused(process: Process) -> Iterator[str]:
    try:
        Config.from_env(process.environ)
    except ConfigError as exc:
        yield str(exc)


def likely_mistakes(seen: Evidence) -> Finding:
    good = "nothing in their environments does nothing"
    return _of_all(seen, _warnings, good, warning, also=_left_plain(seen))


def _left_plain(seen: Evidence) -> Iterator[str]:
    """Servers beside the engines that share, for which KVSHM_ENABLE was probably forgotten."""
    if pids := ", ".join(map(str, seen.processes.plain)):
        yield f"vLLM runs without KVSHM_ENABLE, 1 or 0, and shares nothing (process {pids})"


def _warnings(process: Process) -> Iterator[str]:
    try:
        yield from Config.from_env(process.environ).warnings
    except ConfigError:
        return  # ``own_settings`` shows it


def hash_seeds(seen: Evidence) -> Finding:
    """Without the variable vLLM's default hash starts from a fixed one."""
    if not (here := using_this(seen)):
        return not_applicable(NO_PROCESS)
    by_seed = defaultdict(list)
    for process in here:
        by_seed[process.environ.get("PYTHONHASHSEED")].append(str(process.pid))
    texts = [f"{seed or 'unset'} in {', '.join(pids)}" for seed, pids in by_seed.items()]
    found = [f"PYTHONHASHSEED differs: {'; '.join(texts)}"] if len(texts) > 1 else []
    return judged(found, f"PYTHONHASHSEED is {texts[0]}", problem)


def allocator(seen: Evidence) -> Finding:
    return _of_all(seen, _unexportable, "no engine process asks for another allocator", problem)


def _unexportable(process: Process) -> Iterator[str]:
    for name in ALLOCATOR:
        for kind in ("expandable_segments:True", "backend:cudaMallocAsync"):
            if kind in process.environ.get(name, "").replace(" ", ""):
                yield f"{name} has {kind}, whose memory cannot be exported as it is"


def front_end(seen: Evidence) -> Finding:
    return _of_all(seen, _rust, "no engine process asks for the Rust front end", warning)


def _rust(process: Process) -> Iterator[str]:
    if _number(process.environ.get("VLLM_USE_RUST_FRONTEND", "")):
        yield "VLLM_USE_RUST_FRONTEND drops the metrics that a connector adds to vLLM's"


def _number(text: str) -> int:
    """As vLLM reads it, which does not start with another text."""
    with suppress(ValueError):
        return int(text)
    return 0


def _of_all(
    seen: Evidence,
    find: Callable[[Process], Iterator[str]],
    good: str,
    bad: Callable[[str], Finding],
    also: Iterable[str] = (),
) -> Finding:
    """Each text once, with the processes for which it was found."""
    if not (here := using_this(seen)):
        return not_applicable(NO_PROCESS)
    texts = defaultdict(list)
    for process in here:
        for text in find(process):
            texts[text].append(str(process.pid))
    told = [f"{text} (process {', '.join(pids)})" for text, pids in texts.items()]
    return judged([*told, *also], good, bad)
