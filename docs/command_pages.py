"""Write docs/commands/, one page for each command of ``kvshm`` from the command's own parser, and
docs/doctor.md from the checks of ``kvshm doctor``.

    make docs

A test compares the committed pages with the generated ones.  Unlike docs/generate.py this program
needs the native module, since commands do.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvshm.tools import cli
from kvshm.tools.doctor.registry import CHECKS

FOLDER = Path(__file__).with_name("commands")
DOCTOR = Path(__file__).with_name("doctor.md")


def pages() -> Mapping[str, str]:
    """Return the text of each page by its file's name."""
    parsers = _verbs(cli.build_parser())
    made = {f"{name}.md": "\n".join(_page(parsers[name])).rstrip() + "\n" for name in cli.COMMANDS}
    return made | {"README.md": "\n".join(_index()) + "\n"}


def write() -> None:
    """Make the folder what ``pages`` says."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, "utf-8")
    DOCTOR.write_text(doctor_page(), "utf-8")


def doctor_page() -> str:
    """Return the text of docs/doctor.md."""
    rows = (
        f"| {check.name} | {_escaped(check.looks_at)} | {_escaped(check.remedy)} |"
        for check in CHECKS
    )
    return "\n".join([*_DOCTOR_HEAD, *rows]) + "\n"


_DOCTOR_HEAD = """\
# kvshm doctor

`make docs` writes this page from the checks themselves. Options and exit status:
[kvshm doctor](commands/doctor.md).

Each check prints one line: `ok`, `warning` (engines serve, perhaps not as meant), `problem`
(something does not work) or `not applicable` (there is nothing to check, for the reason given).
Below a warning or a problem stands its remedy. Warnings leave the exit status 0. A check that fails
itself, or has no answer within ten seconds, is a problem that `could not be checked`.

What engine processes were started with is read from `/proc`, as far as their user is the one of
this command: only `KVSHM_` variables and a short list of others. What runs as another user is not
seen.

`--bundle FILE` writes what a bug report needs: what the checks found, the reports of `kvshm status`
and `kvshm dump`, versions, settings and limits. Block hashes, command lines, other variables, the
names of users and of the machine, and home directories are left out or replaced; names that tell
nothing, such as `root` and `vllm`, stay. Look through the file before you send it.

| check | looks at | remedy |
|---|---|---|""".splitlines()


def _index() -> Iterator[str]:
    yield from ("# Commands", "")
    yield "`make docs` writes these pages from the commands themselves."
    yield "What to do with them: [operations](../operations.md)."
    yield from ("", "| command | does |", "|---|---|")
    for name, command in cli.COMMANDS.items():
        aliases = "".join(f", `kvshm {alias}`" for alias in cli.ALIASES.get(name, []))
        yield f"| [`kvshm {name}`]({name}.md){aliases} | {_escaped(command.HELP)} |"
    yield ""
    yield "Every command has `--help`. Exit status 2 always means a wrong command line, a bad"
    yield "setting or a missing package, and 4 that no engine is called as `--engine` says (a probe"
    yield "answers 1, no): a line on stderr says which, and with `--json`, too, nothing stands on"
    yield "stdout. That there is nothing to show is an answer, and JSON. 130 is an interrupt, and"
    yield "141 that the reader of the output has gone (`| head`)."


def _page(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (f"# {parser.prog}", "")
    yield from _section(parser)
    for verb in _verbs(parser).values():
        yield from (f"## {verb.prog}", "")
        yield from _section(verb)


def _section(parser: argparse.ArgumentParser) -> Iterator[str]:
    shown = [action for action in parser._actions if _is_shown(action)]
    words = [_called(action) for action in shown if not action.option_strings]
    verb = ["VERB"] if _verbs(parser) else []
    yield from ("    " + " ".join([parser.prog, "[options]", *words, *verb]), "")
    if parser.description:
        yield from (_escaped(parser.description), "")
    if shown:
        yield from ("| option | means |", "|---|---|", *(_row(parser, one) for one in shown), "")
    if parser.epilog:
        yield from (_sentence(_escaped(" ".join(parser.epilog.split()))), "")


def _is_shown(action: argparse.Action) -> bool:
    own = isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
    return not own and action.help is not argparse.SUPPRESS


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    told = (action.help or "") % {"default": action.default, "prog": parser.prog}
    return f"| `{_escaped(_called(action))}` | {_escaped(told)} |"


def _called(action: argparse.Action) -> str:
    """How it is written on a command line; argparse's own text differs between Pythons."""
    value = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else None)
    if not action.option_strings:
        return str(value or action.dest.upper())
    given = "" if action.nargs == 0 else f" {value or action.dest.upper()}"
    return ", ".join(action.option_strings) + given


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            by_parser = {id(one): (name, one) for name, one in reversed(action.choices.items())}
            return dict(reversed(by_parser.values()))
    return {}


def _sentence(text: str) -> str:
    return re.sub(r"^exit status", "**Exit status**", text) + ("" if text.endswith(".") else ".")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    write()
