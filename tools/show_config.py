"""``kvshm config``: the settings of a process that is started in this environment."""

from __future__ import annotations

import argparse
import os
import sys

from kvshm.config import Config, list_settings
from kvshm.interfaces import check_installed

HELP = "print each setting, its value and where it came from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what it does."""
    parser.description = "Print the settings of a process that is started in this environment."
    parser.epilog = "exit status: 0; 2 a bad setting, which the message names"


def run(asked: argparse.Namespace) -> int:
    """Print one setting a line."""
    settings = list_settings(os.environ)
    config = Config.from_env(os.environ)
    check_installed(config.transport)
    widths = [max(len(setting[column]) for setting in settings) for column in (0, 1)]
    for name, value, origin in settings:
        print(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}")
    for warning in config.warnings:
        print(f"kvshm: {warning}", file=sys.stderr)
    return 0
