"""Runs parts of what needs a GPU, whatever fails, and writes what was seen into files.

    python3 benchmarks/gpu_suite.py a        # or b, c, d, e, several, or steps: gpu_steps.py

Names of steps make one part together.  A part takes eight minutes at most: each of its steps has a
limit, after which its processes are killed and the next step begins.  With KVSHM_GPU_RESULTS=FOLDER
the output of part a is appended to FOLDER/gpu-a.txt too, and its lines of JSON, with time and card,
to FOLDER/gpu-a.jsonl, line by line: what was seen stays if this program is killed.  Every step has
a line that says how it ended, or that it was not run.  Ends with 1 if a step failed, and with 2,
before the first step, if the folder cannot be written.  Needs only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from gpu_steps import CARD_LIMIT_S, PARTS, READY, Step, chosen

ROOT = Path(__file__).parents[1]
GVISOR = "4.4.0"
CARD = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used",
        "--format=csv,noheader")  # fmt: skip
GRACE_S = 5.0
"""Of a step's limit: for ending by SIGTERM, before SIGKILL."""


class Results:
    """Where the output of one part goes: to the console, and to files if a folder is given."""

    def __init__(self, part: str, folder: str | None) -> None:
        """Opens the files, to append to them.  Raises OSError."""
        self._lock = threading.Lock()
        self._files: dict[str, IO[str]] = {}
        self.how: dict[str, str] = {}
        """How each step ended, by name."""
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for kind in ("txt", "jsonl"):
                path = Path(folder, f"gpu-{part}.{kind}")
                self._files[kind] = path.open("a", buffering=1, encoding="utf-8")

    def line(self, text: str, step: str = "") -> None:
        """Take one line of a step's output; a line of JSON is kept with the step's name, the time
        and the card."""
        with self._lock:
            print(text, flush=True)
            try:
                self._keep(text, step)
            except OSError as exc:  # a full disk, say: the console has the rest
                print(f"results are written to no file from here on: {exc}", flush=True)
                self._files = {}

    def _keep(self, text: str, step: str) -> None:
        if not self._files:
            return
        print(text, file=self._files["txt"])
        if text.startswith('{"benchmark"'):
            with contextlib.suppress(json.JSONDecodeError):
                found = {**json.loads(text), "step": step, "utc": utc(), "card": card()}
                print(json.dumps(found), file=self._files["jsonl"])

    def ended(self, step: Step, how: str, seconds: float = 0.0) -> None:
        """Note and say how a step ended."""
        self.how[step.name] = how
        found = {"benchmark": "gpu step", "name": step.name, "ended": how}
        said = {**found, "seconds": round(seconds, 1), "limit": step.limit}
        self.line(json.dumps(said), step.name)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._files = {}


def main() -> int:
    options = arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # not without ending the step
    parts = chosen(options.parts)
    folder = os.environ.get("KVSHM_GPU_RESULTS")
    try:
        opened = [Results(part, folder) for part, _ in parts]
    except OSError as exc:
        print(f"KVSHM_GPU_RESULTS={folder}: no results can be written there: {exc}")
        return 2
    failed = False
    for (part, steps), results in zip(parts, opened, strict=True):
        patient = [step._replace(limit=step.limit * options.patience) for step in steps]
        failed |= not run_part(part, patient, results)
    return int(failed)


def run_part(part: str, steps: Sequence[Step], results: Results, first: Step = READY) -> bool:
    """Run ``first``, then, if it ended well, all steps; whether all ended well."""
    begun = time.monotonic()
    results.line(f"=== part {part}, {utc()}")
    try:
        for line in machine():
            results.line(line, "machine")
        for step in (first, *steps):
            if results.how.get(first.name, "ok") == "ok":
                run_step(step, results)
    finally:  # if this program is told to end, too
        for step in steps:
            if step.name not in results.how:
                results.ended(step, "not run")
        said = ", ".join(f"{name}: {how}" for name, how in results.how.items())
        results.line(f"part {part}, {time.monotonic() - begun:.0f} s: {said}")
        results.close()
    return set(results.how.values()) == {"ok"}


def run_step(step: Step, results: Results) -> None:
    """Run one step until its end or its limit."""
    results.line(f"--- {step.name}, {step.limit:g} s at most: python {' '.join(step.command)}")
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *step.command], cwd=ROOT, env=environment(), text=True,
        errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    reader = threading.Thread(target=_read, args=(process, step, results), daemon=True)
    reader.start()
    how = "ended with the suite"
    try:
        how = _ended(process, step.limit)
    finally:
        reader.join(2)  # a process that left the group may still hold the pipe
        results.ended(step, how, time.monotonic() - begun)


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


def machine() -> Iterator[str]:
    """What must be known before anything else is believed: kernel, card and driver."""
    kernel = platform.release()
    yield f"uname -r: {kernel}"
    if kernel == GVISOR:
        yield "This is gVisor: nothing about CUDA IPC follows from what is seen here."
    yield f"nvidia-smi: {card()}"
    yield f"python: {sys.version}"
    found = {"benchmark": "gpu machine", "kernel": kernel, "gvisor": kernel == GVISOR}
    yield json.dumps({**found, "card": card(), "cores": os.cpu_count()})


@functools.cache
def card() -> str:
    """Name, driver and memory of the cards, or what nvidia-smi said instead; asked for once."""
    try:
        ran = subprocess.run(
            CARD, capture_output=True, text=True, timeout=CARD_LIMIT_S, check=False
        )
        return (ran.stdout or ran.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"nvidia-smi: {exc}"


def utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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
