"""``kvshm completion``: a script that lets a shell complete kvshm's commands and options."""

from __future__ import annotations

import argparse

HELP = "print a script by which a shell completes this command"
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

    print(shtab.complete(asked.parser, asked.shell))
    return 0
