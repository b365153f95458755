"""Runs parts of what needs a GPU, whatever fails, and writes what was seen into files.

    python3 benchmarks/gpu_suite.py a        # or b, c, d, several, or steps: gpu_steps.py

Names of steps make one part together.  A part takes eight minutes at most: each of its steps has a
limit, after which its processes are killed and the next step begins.  With KVSHM_GPU_RESULTS=FOLDER
the output of part a goes to FOLDER/gpu-a.txt too, and its lines of JSON to FOLDER/gpu-a.jsonl, line
by line: what was seen stays if this program is killed.  Ends with 1 if a step failed.  Needs only
the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from gpu_steps import PARTS, READY, Step, chosen

ROOT = Path(__file__).parents[1]
GVISOR = "4.4.0"
CARD = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used",
        "--format=csv,noheader")  # fmt: skip
GRACE_S = 5.0
"""Of a step's limit: for ending by SIGTERM, before SIGKILL."""


class Results:
    """Where the output of one part goes: to the console, and to files if a folder is given."""

    def __init__(self, part: str, folder: str | None) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, IO[str]] = {}
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for kind in ("txt", "jsonl"):
                path = Path(folder, f"gpu-{part}.{kind}")
                self._files[kind] = path.open("w", buffering=1, encoding="utf-8")

    def line(self, text: str, step: str = "") -> None:
        """Take one line of a step's output; a line of JSON is kept with the step's name."""
        with self._lock:
            print(text, flush=True)
            if not self._files:
                return
            print(text, file=self._files["txt"])
            if text.startswith('{"benchmark"'):
                with contextlib.suppress(json.JSONDecodeError):
                    found = {**json.loads(text), "step": step}
                    print(json.dumps(found), file=self._files["jsonl"])

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files = {}


def main() -> int:
    options = arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # not without ending the step
    failed = []
    for part, steps in chosen(options.parts):
        patient = [step._replace(limit=step.limit * options.patience) for step in steps]
        if not run_part(part, patient):
            failed.append(part)
    return int(bool(failed))


def run_part(part: str, steps: Sequence[Step], first: Step = READY) -> bool:
    """Run ``first``, then, if it ended well, all steps; whether all ended well."""
    results = Results(part, os.environ.get("KVSHM_GPU_RESULTS"))
    begun = time.monotonic()
    for line in machine():
        results.line(line, "machine")
    ended = {first.name: run_step(first, results)}
    if ended[first.name] == "ok":
        ended |= {step.name: run_step(step, results) for step in steps}
    else:
        ended |= {step.name: "not run" for step in steps}
    said = ", ".join(f"{name}: {how}" for name, how in ended.items())
    results.line(f"part {part}, {time.monotonic() - begun:.0f} s: {said}")
    results.close()
    return set(ended.values()) == {"ok"}


def run_step(step: Step, results: Results) -> str:
    """Run one step until its end or its limit; "ok", or how it failed."""
    results.line(f"--- {step.name}, {step.limit:g} s at most: python {' '.join(step.command)}")
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *step.command], cwd=ROOT, env=environment(), text=True,
        errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    reader = threading.Thread(target=_read, args=(process, step, results), daemon=True)
    reader.start()
    how = _ended(process, step.limit)
    reader.join(2)  # a process that left the group may still hold the pipe
    seconds = round(time.monotonic() - begun, 1)
    found = {"benchmark": "gpu step", "name": step.name, "ended": how, "seconds": seconds}
    results.line(json.dumps({**found, "limit": step.limit}), step.name)
    return how


def _read(process: subprocess.Popen[str], step: Step, results: Results) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            results.line(line.rstrip("\n"), step.name)


def _ended(process: subprocess.Popen[str], limit: float) -> str:
    """Wait for the end; after the limit end the process and all it started.  How it ended."""
    grace = min(GRACE_S, limit / 4)
    try:
        status = process.wait(limit - grace)
        return "ok" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        return f"stopped after {limit:g} s"
    finally:
        # What it started and left behind would disturb the next step.
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def environment() -> dict[str, str]:
    """For all steps: where modules are found, and no plugins of pytest but those named."""
    paths = [str(ROOT), str(ROOT / "examples"), str(ROOT / "dist" / "gpu-site")]
    if before := os.environ.get("PYTHONPATH"):
        paths.append(before)
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip


def machine() -> list[str]:
    """What must be known before anything else is believed: kernel, card and driver."""
    kernel = platform.release()
    try:
        ran = subprocess.run(CARD, capture_output=True, text=True, timeout=20, check=False)
        card = (ran.stdout or ran.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as exc:
        card = f"nvidia-smi: {exc}"
    lines = [f"uname -r: {kernel}", f"nvidia-smi: {card}", f"python: {sys.version}"]
    if kernel == GVISOR:
        lines.insert(1, "This is gVisor: nothing about CUDA IPC follows from what is seen here.")
    found = {"benchmark": "gpu machine", "kernel": kernel, "gvisor": kernel == GVISOR}
    return [*lines, json.dumps({**found, "card": card, "cores": os.cpu_count()})]


def arguments() -> argparse.Namespace:
    steps = {step.name for part in PARTS.values() for step in part}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    told = f"{', '.join(PARTS)}, or one of {', '.join(sorted(steps))}"
    parser.add_argument(
        "parts", nargs="+", choices=[*PARTS, *sorted(steps)], metavar="part", help=told
    )
    parser.add_argument("--patience", type=float, default=1, help="multiplies all limits")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
