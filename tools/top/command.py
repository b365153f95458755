"""``kvshm top``: watch what the engines of a node share."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ..node.reader import NodeReader
from ..options import add_selection, find_place, number
from ..output import EXIT_FAILED, note
from .history import NodeHistory
from .view import View

HELP = "watch what engines share: hits, copies and their paths, faults"
LEAST_INTERVAL, MOST_INTERVAL = 0.1, 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Watch a node: what its engines share, which copies from which on which path, and what is "
        "wrong. q ends it. --json prints one object per interval, and needs no rich. Reads shared "
        "memory only."
    )
    parser.epilog = (
        "exit status: 0 ended by the user, or printed; 1 nothing of kvshm runs; 2 wrong command "
        "line or setting, or rich is missing; 4 no engine has that name"
    )
    add_selection(parser)
    parser.add_argument("--once", action="store_true", help="print one interval and end")
    interval = number(
        float,
        lambda seconds: LEAST_INTERVAL <= seconds <= MOST_INTERVAL,
        f"of {LEAST_INTERVAL} to {MOST_INTERVAL:.0f} seconds",
    )
    parser.add_argument(
        "--interval", type=interval, default=1.0, metavar="SECONDS", help="default: 1"
    )


def run(asked: argparse.Namespace) -> int:
    show: Callable[[View], None] = _print_json
    if not asked.json:
        from .screen import print_frame as show  # needs rich, as --json does not

        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a TextIOWrapper
    run_dir, namespace = find_place(asked)
    try:
        with NodeReader(run_dir, namespace, in_turn=True) as reader:
            return _show(asked, run_dir, NodeHistory(reader, asked.engine), show)
    except KeyboardInterrupt:
        return 0


def _show(
    asked: argparse.Namespace, run_dir: Path, history: NodeHistory, show: Callable[[View], None]
) -> int:
    first = history.look()
    history.check_wanted()
    if not first.namespaces:
        if asked.json and asked.once:
            show(first)
        note(f"nothing of kvshm runs in {run_dir}")
        return EXIT_FAILED
    if asked.once:
        time.sleep(asked.interval)
        show(history.look_once_more())
    elif asked.json or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        _print_on(asked.interval, history, show)
    else:
        from .screen import Screen

        Screen(history.look, asked.interval).run(first)
    return 0


def _print_on(interval: float, history: NodeHistory, show: Callable[[View], None]) -> None:
    """Print one view after the other, until a signal or the end of the reader."""
    while True:
        time.sleep(interval)
        show(history.look())
        sys.stdout.flush()


def _print_json(view: View) -> None:
    print(json.dumps(view.as_json()))
