"""``kvshm completion``: a script that lets a shell complete kvshm's commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

HELP = "print a script by which a shell completes this command"
PATHS, DIRECTORIES = ("FILE", "PATH", "DUMP"), ("run_dir", "directory")
"""Whose arguments are files or directories."""
SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the shell."""
    parser.description = (
        "Print the script; needs shtab (pip install 'kvshm[ops]'). For bash: "
        "kvshm completion bash > ~/.local/share/bash-completion/completions/kvshm"
    )
    parser.add_argument("shell", choices=SHELLS, help="for which shell")


def run(asked: argparse.Namespace) -> int:
    """Print the script for ``asked.parser``, the parser of the whole command."""
    import shtab

    for action in _options_of(asked.parser):
        if action.metavar in PATHS or action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # of shtab
        elif action.dest in DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(asked.parser, asked.shell))
    return 0


def _options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options_of(command)
        else:
            yield action
