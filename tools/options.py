"""Options that the commands of ``kvshm`` share: which engines are meant, and how to print."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kvshm._ground.rundir import choose_run_directory, open_run_directory
from kvshm.config import Config


def add_selection(parser: argparse.ArgumentParser, *, engine: bool = True) -> None:
    """Add --run-dir, --namespace, --json and, unless told otherwise, --engine."""
    add = parser.add_argument
    if engine:
        add("--engine", metavar="NAME|PID|EPOCH", help="only this engine; an epoch is hexadecimal")
    add("--namespace", help="only this namespace (default: $KVSHM_NAMESPACE, else all; '': all)")
    add("--run-dir", help="where the engines' sockets lie (default: as for engines)")
    add("--json", action="store_true", help="as JSON")


def find_place(asked: argparse.Namespace) -> tuple[Path, str | None]:
    """Return the run directory, checked if it exists, and the namespace that is meant (None: all).

    Reads no other setting, since a command that shows things also helps to find out what is wrong
    with the others.  Raises ConfigError or RunDirectoryError.
    """
    options = {"--namespace": asked.namespace, "--run-dir": asked.run_dir}
    config = Config.of_place(os.environ, options)
    run_dir = choose_run_directory(config.run_dir, os.environ)
    if os.path.exists(run_dir):
        open_run_directory(config.run_dir, os.environ)
    return run_dir, config.namespace if "KVSHM_NAMESPACE" in config.given else None
