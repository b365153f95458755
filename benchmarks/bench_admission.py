"""What it costs a process of vLLM to tell whether kvshm knows its vLLM.

    .venv/bin/python benchmarks/bench_admission.py [--rounds 40]

Each measurement is a process of its own, which has imported what vLLM has imported by then, and
times ``kvshm.hooks.vllm.admission``: import, data file, vLLM's sources.  In turns, each over a copy
of those of vLLM's files that count: ``tested``, as they are; ``elsewhere``, each with a comment in
each function, another import and another function; ``reformatted``, each written anew from what
Python parses; ``changed``, each function with another statement, so that kvshm refuses.  Files come
out of the page cache.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from measurement import percentiles, report

from kvshm.hooks.vllm.admission import known_sources

MEASURED = """
import ast, functools, hashlib, json, logging, pathlib, re, sys, time, typing
import kvshm
begun = time.perf_counter()
from kvshm.hooks.vllm.admission import examine, known_sources
found = examine(pathlib.Path(sys.argv[1]), known_sources()["files"])
taken = time.perf_counter() - begun
assert not found.unreadable
print(taken, len(found.different))
"""
LINE = "kvshm_benchmark = 1"


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("there is no vLLM in this environment: make setup")
    taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
    different: dict[str, int] = {}
    with TemporaryDirectory() as directory:
        for arm, changed in ARMS.items():
            write_copy(Path(spec.origin).parent, Path(directory, arm), changed)
        for _ in range(rounds):
            for arm, times in taken.items():
                milliseconds, different[arm] = measured(Path(directory, arm))
                times.append(milliseconds)
    assert all((different[arm] > 0) == (arm == "changed") for arm in ARMS), different
    report(
        "admission",
        milliseconds={arm: percentiles(times) for arm, times in taken.items()},
        different=different,
    )


def in_each_function(text: str, line: str) -> str:
    """Put a line at the beginning of each function's statements."""
    lines = text.split("\n")
    functions = [
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body[0].lineno > node.lineno
    ]
    for first in sorted(functions, key=lambda node: node.lineno, reverse=True):
        lines.insert(first.lineno - 1, " " * first.col_offset + line)
    return "\n".join(lines)


def elsewhere(text: str) -> str:
    """Change what kvshm does not rely on."""
    added = f"\n\ndef kvshm_benchmark():\n    {LINE}\n"
    return (
        in_each_function(text, "# A comment.").replace("\nimport ", "\nimport kvshm\nimport ", 1)
        + added
    )


ARMS: Mapping[str, Callable[[str], str]] = {
    "tested": str,
    "elsewhere": elsewhere,
    "reformatted": lambda text: ast.unparse(ast.parse(text)),
    "changed": lambda text: in_each_function(text, LINE),
}


def write_copy(root: Path, directory: Path, changed: Callable[[str], str]) -> None:
    """Copy those files of vLLM's package that count, each changed."""
    for file in known_sources()["files"]:
        if (root / file).exists():
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_bytes(changed((root / file).read_text("utf-8")).encode())


def measured(root: Path) -> tuple[float, int]:
    """Return the milliseconds that a new process takes, and how many differences it finds."""
    command = [sys.executable, "-c", MEASURED, str(root)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return 1e3 * float(printed[0]), int(printed[1])


if __name__ == "__main__":
    main()
