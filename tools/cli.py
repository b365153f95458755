"""The command ``kvshm``: shows what engines share and how well, and clears up."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvshm.version import __version__

from . import (
    clean,
    completion,
    coordinator,
    dump_index,
    holders,
    show_config,
    status,
    up,
    verify_logits,
)
from .commands import Command, run_command
from .doctor import command as doctor
from .drain import command as drain
from .events import command as events
from .indexer import command as indexer
from .keeper import command as keeper
from .kv import command as kv
from .metrics import command as metrics
from .output import EXIT_USAGE
from .serve import command as serve
from .top import command as top

COMMANDS: dict[str, Command] = {
    "up": up,
    "status": status,
    "top": top,
    "dump": dump_index,
    "doctor": doctor,
    "holders": holders,
    "metrics": metrics,
    "serve": serve,
    "config": show_config,
    "clean": clean,
    "coordinator": coordinator,
    "keeper": keeper,
    "events": events,
    "indexer": indexer,
    "drain": drain,
    "kv": kv,
    "verify-logits": verify_logits,
    "completion": completion,
}
"""In the order of ``kvshm --help``."""
ALIASES = {"dump": ["dump-index"]}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvshm", description="See what the vLLM engines of this machine share, and clear up."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        one = verbs.add_parser(name, help=command.HELP, aliases=ALIASES.get(name, []))
        command.add_arguments(one)
        one.set_defaults(command=name)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the command line names; return the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["coordinator"]:  # its options are its own, --help among them
        return run_command("coordinator", lambda: coordinator.start(words[1:]))
    parser = build_parser()
    asked = parser.parse_args(words, argparse.Namespace(parser=parser))
    if asked.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    name = " ".join(filter(None, (asked.command, getattr(asked, "verb", None))))
    return run_command(name, lambda: COMMANDS[asked.command].run(asked))


if __name__ == "__main__":
    sys.exit(main())
