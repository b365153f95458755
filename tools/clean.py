"""``kvshm clean``: removes the files that crashed engines and coordinators have left."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from kvshm._base.rundir import open_run_directory
from kvshm._node.leftovers import CleanupResult, clear

from .options import add_place, read_place
from .output import clean, note, show

HELP = "remove what a crash has left"
EXIT_CLEAN, EXIT_LEFT = range(2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Remove the sockets, lists and lock files of processes that have ended. Run it as the "
        "engines' user."
    )
    parser.epilog = (
        "exit status: 0 nothing is left; 1 something is left, or a coordinator serves and clears "
        "up itself; 2 wrong command line or setting"
    )
    add_place(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(asked: argparse.Namespace) -> int:
    config, place = read_place(asked)
    if os.path.lexists(place):
        run_dir = open_run_directory(config.run_dir, os.environ)
        found = clear(run_dir, config.namespace, dry_run=asked.dry_run)
    else:
        note(f"nothing to do: there is no directory {place}")
        found = CleanupResult()
    done = "would remove" if asked.dry_run else "removed"
    data = {"dry_run": asked.dry_run, **asdict(found)}
    show(data, lambda: [clean(f"{done} {what}") for what in found.removed], as_json=asked.json)
    if not asked.json:
        note(*(f"left alone: {what}" for what in found.left))
        if found.coordinator:
            note(f"nothing done: {found.coordinator}")
    return EXIT_LEFT if found.left or found.coordinator else EXIT_CLEAN
