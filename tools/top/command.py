"""``kvshm top``: watch what the engines of a node share.

Exit status: 0; 1 if there is nothing of kvshm; 2 for a wrong command line or setting, or if rich is
not installed; 4 if there is not the engine that is meant.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ..node.reader import NodeReader
from ..options import add_selection, find_place
from ..output import EXIT_FAILED, note
from .looks import Looks
from .view import View

HELP = "watch what engines share: hits, copies and their paths, faults"
LEAST_INTERVAL, MOST_INTERVAL = 0.1, 86400.0
"""Seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Watch a node: what its engines share, who copies from whom on which path, and what is "
        "wrong. q ends it. --json prints one object per interval, and needs no rich. Reads shared "
        "memory only."
    )
    parser.epilog = (
        "exit status: 0 ended by the user, or printed; 1 nothing of kvshm runs; 2 wrong command "
        "line or setting, or rich is missing; 4 no engine is called so"
    )
    add_selection(parser)
    parser.add_argument("--once", action="store_true", help="print one interval and end")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="default: 1"
    )


def run(asked: argparse.Namespace) -> int:
    """Show the node until the user ends it; return the exit status."""
    show: Callable[[View], None] = _print_json
    if not asked.json:
        from .screen import print_frame as show  # needs rich, as --json does not

        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a TextIOWrapper
    run_dir, namespace = find_place(asked)
    try:
        with NodeReader(run_dir, namespace, in_turn=True) as reader:
            return _show(asked, run_dir, Looks(reader, asked.engine), show)
    except KeyboardInterrupt:
        return 0


def _show(
    asked: argparse.Namespace, run_dir: Path, looks: Looks, show: Callable[[View], None]
) -> int:
    first = looks.look()
    looks.check_wanted()
    if not first.namespaces:
        if asked.json and asked.once:
            show(first)
        note(f"nothing of kvshm runs in {run_dir}")
        return EXIT_FAILED
    if asked.once:
        time.sleep(asked.interval)
        show(looks.look_once_more())
    elif asked.json or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        _print_on(asked.interval, looks, show)
    else:
        from .screen import Screen

        Screen(looks.look, asked.interval).run(first)
    return 0


def _print_on(interval: float, looks: Looks, show: Callable[[View], None]) -> None:
    """Print one view after the other, until a signal or the end of the reader."""
    while True:
        time.sleep(interval)
        show(looks.look())
        sys.stdout.flush()


def _print_json(view: View) -> None:
    print(json.dumps(view.as_json()))


def _interval(text: str) -> float:
    seconds = float(text)
    if not LEAST_INTERVAL <= seconds <= MOST_INTERVAL:
        wanted = f"{LEAST_INTERVAL} to {MOST_INTERVAL:.0f} seconds"
        raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
    return seconds
