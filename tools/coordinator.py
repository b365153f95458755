"""``kvshm coordinator``: the same as the program kvshm-coordinator."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

HELP = "serve the engines of this machine: the same as kvshm-coordinator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Start the coordinator; see kvshm-coordinator --help for its options."
    parser.add_argument("options", nargs=argparse.REMAINDER, help="those of kvshm-coordinator")


def run(asked: argparse.Namespace) -> int:
    start(asked.options)


def start(options: Sequence[str]) -> NoReturn:
    """Replace this process by the coordinator, so that it gets all signals itself."""
    command = [sys.executable, "-m", "kvshm.coordinator.program", *options]
    os.execv(sys.executable, command)
