"""``kvshm clean``: removes the files that crashed engines and coordinators have left.

Needed only where no process of kvshm runs any more: a coordinator clears up at its start and
while it serves, and the last engine clears up at its end.  Files of running processes stay.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from kvshm._base.rundir import choose_run_directory, open_run_directory
from kvshm._node.leftovers import CleanupResult, clear
from kvshm.config import Config

from .output import clean, note, show

HELP = "remove what a crash has left"
EXIT_CLEAN, EXIT_LEFT = range(2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which engines are meant."""
    parser.description = (
        "Remove the sockets, lists and lock files of processes that have ended. Run it as the "
        "engines' user."
    )
    parser.epilog = (
        "exit status: 0 nothing is left; 1 something is left, or a coordinator serves and clears "
        "up itself; 2 wrong command line or setting"
    )
    parser.add_argument("--namespace", help="of which engines (default: $KVSHM_NAMESPACE)")
    parser.add_argument("--run-dir", help="where their sockets lie (default: as for engines)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(asked: argparse.Namespace) -> int:
    """Remove the files, print what was done; return the exit status."""
    options = {"--namespace": asked.namespace, "--run-dir": asked.run_dir}
    # No other setting is read: one that is wrong is no reason to leave the files.
    config = Config.of_place(os.environ, options)
    if os.path.lexists(place := choose_run_directory(config.run_dir, os.environ)):
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
