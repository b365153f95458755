"""``kvshm clean``: removes the files that crashed engines and coordinators have left.

Needed only where no process of kvshm runs any more: a coordinator clears up at its start and
while it serves, and the last engine clears up at its end.  Files of running processes stay.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvshm._ground.rundir import open_run_directory
from kvshm._node.leftovers import clear
from kvshm.config import Config
from kvshm.errors import ConfigError, KvshmError

EXIT_CLEAN, EXIT_LEFT, EXIT_USAGE = range(3)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvshm clean",
        description="Remove the sockets, lists and lock files of processes that have ended. Run it "
        "as the engines' user.",
        epilog="exit status: 0 nothing is left; 1 something is left, or a coordinator serves and "
        "clears up itself; 2 wrong command line or setting",
    )
    parser.add_argument("--namespace", help="of which engines (default: $KVSHM_NAMESPACE)")
    parser.add_argument("--run-dir", help="where their sockets lie (default: as for engines)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Remove the files, print a line for each; return the exit status."""
    asked = _parser().parse_args(arguments)
    options = {"--namespace": asked.namespace, "--run-dir": asked.run_dir}
    try:
        config = Config.from_env(os.environ, options)
        run_dir = open_run_directory(config.run_dir, os.environ)
        found = clear(run_dir, config.namespace, dry_run=asked.dry_run)
    except (KvshmError, OSError) as exc:
        print(f"kvshm clean: {exc}", file=sys.stderr)
        return EXIT_USAGE if isinstance(exc, ConfigError) else EXIT_LEFT
    for what in found.removed:
        print(f"would remove {what}" if asked.dry_run else f"removed {what}")
    for what in found.left:
        print(f"left alone: {what}", file=sys.stderr)
    if found.coordinator:
        print(f"nothing done: {found.coordinator}", file=sys.stderr)
    return EXIT_LEFT if found.left or found.coordinator else EXIT_CLEAN
