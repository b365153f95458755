"""Write docs/commands.md from the parsers of all commands of ``kvshm``, and doctor's checks.

    make docs

A test compares the committed page with the generated one.  Unlike docs/generate.py this program
needs the native module, since commands do.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from kvshm.tools import cli
from kvshm.tools.doctor.registry import CHECKS

PAGE = Path(__file__).with_name("commands.md")


def page() -> str:
    """Return the text of the page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield from _index()
    parsers = _verbs(cli.build_parser())
    for name in cli.COMMANDS:
        yield from ("", f"## {parsers[name].prog}", "")
        yield from _section(parsers[name])
        for verb in _verbs(parsers[name]).values():
            yield from (f"### {verb.prog}", "")
            yield from _section(verb)
        if name == "doctor":
            yield from _CHECKS_HEAD
            for check in CHECKS:
                cells = (check.name, _escaped(check.looks_at), _escaped(check.remedy))
                yield f"| {' | '.join(cells)} |"


_CHECKS_HEAD = """\
### Checks of kvshm doctor

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
    yield "`make docs` writes this page from the commands themselves."
    yield "What to do with them: [operations](operations.md)."
    yield from ("", "| command | does |", "|---|---|")
    for name, command in cli.COMMANDS.items():
        aliases = "".join(f", `kvshm {alias}`" for alias in cli.ALIASES.get(name, []))
        yield f"| [`kvshm {name}`](#kvshm-{name}){aliases} | {_escaped(command.HELP)} |"
    yield ""
    yield "Every command has `--help`. Exit status 2 always means a wrong command line, a bad"
    yield "setting or a missing package, and 4 that no engine has the name that `--engine` gives"
    yield "(a probe answers 1, no): a line on stderr says which, and also with `--json` nothing is"
    yield "printed on stdout. That there is nothing to show is an answer, and JSON. 130 is an"
    yield "interrupt, and 141 that the reader of the output has gone (`| head`)."


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
    PAGE.write_text(page(), "utf-8")
