"""The command ``kvshm``: shows what engines share, removes what a crash has left, keeps blocks.

Exit status: the verb's, or 2 for a wrong command line or a bad setting.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from kvshm.config import Config, list_settings
from kvshm.errors import KvshmError
from kvshm.interfaces import check_installed
from kvshm.version import __version__

from . import clean, dump_index, verify_logits
from .closed_pipe import run_until_pipe_closes
from .kv import command as kv

EXIT_USAGE = 2
OTHERS: dict[str, Callable[[Sequence[str]], int]] = {
    "dump-index": dump_index.main,
    "clean": clean.main,
    "kv": kv.main,
    "verify-logits": verify_logits.main,
}
"""The verbs that have options of their own."""


def print_config(environ: Mapping[str, str]) -> int:
    """Print the settings of ``environ``, one per line; return the exit status."""
    try:
        settings = list_settings(environ)
        check_installed(Config.from_env(environ).transport)
    except KvshmError as exc:
        print(f"kvshm: {exc}", file=sys.stderr)
        return EXIT_USAGE
    widths = [max(len(setting[column]) for setting in settings) for column in (0, 1)]
    for name, value, origin in settings:
        print(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}")
    for warning in Config.from_env(environ).warnings:
        print(f"kvshm: {warning}", file=sys.stderr)
    return 0


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvshm", description="See what the vLLM engines of this machine share, and clear up."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    verbs.add_parser("config", help="print each setting, its value and where it came from")
    verbs.add_parser("dump-index", help="show what is in shared memory", add_help=False)
    verbs.add_parser("clean", help="remove what a crash has left", add_help=False)
    verbs.add_parser("kv", help="write blocks to a file, serve them, compare them", add_help=False)
    verbs.add_parser("verify-logits", help="ask two engines the same prompt", add_help=False)
    asked, rest = parser.parse_known_args(arguments)
    if asked.verb in OTHERS:
        return OTHERS[asked.verb](rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if asked.verb == "config":
        return print_config(os.environ)
    parser.print_help(sys.stderr)
    return EXIT_USAGE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb that the command line names; return the exit status."""
    return run_until_pipe_closes(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
