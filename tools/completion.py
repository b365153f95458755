"""``kvshm completion``: a script that lets a shell complete kvshm's commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

HELP = "print a script by which a shell completes this command"
SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the script; needs shtab (pip install 'kvshm[ops]'). For bash: "
        "kvshm completion bash > ~/.local/share/bash-completion/completions/kvshm. "
        "For zsh: kvshm completion zsh > FOLDER/_kvshm, with a FOLDER of $fpath"
    )
    parser.add_argument("shell", choices=SHELLS, help="for which shell")


def run(asked: argparse.Namespace) -> int:
    import shtab

    _describe_briefly(asked.parser)
    for action in _options_of(asked.parser):
        if action.type is Path or action.dest == "run_dir":
            what = shtab.FILE if action.type is Path else shtab.DIRECTORY
            action.complete = what  # type: ignore[attr-defined]  # shtab looks for it
    print(shtab.complete(asked.parser, asked.shell))
    return 0


def _describe_briefly(parser: argparse.ArgumentParser) -> None:
    """Have shtab show the line of --help for each command, not what its own --help explains."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                action.choices[listed.dest].description = listed.help


def _options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options_of(command)
        else:
            yield action
