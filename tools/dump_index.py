"""``kvshm dump`` shows what kvshm has in shared memory.

Asks the engines in the run directory, needs no coordinator, and maps everything read-only.
"""

from __future__ import annotations

import argparse
import string
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__" and not __package__:  # started as a file
    __package__ = "kvshm.tools"

from kvshm.errors import ConfigError

from .check import check
from .commands import run_command
from .node.reader import NodeReader
from .options import add_selection, find_place, select
from .output import clean, cleaned, note, show
from .render import ended, name_of, render
from .report import Filters, build_report

HELP = "show what is in shared memory"


def _hash_prefix(text: str) -> str:
    digits = text.lower().removeprefix("0x")
    if not digits or not set(digits) <= set(string.hexdigits):
        raise argparse.ArgumentTypeError(f"{text!r} is not the beginning of a hexadecimal hash")
    return digits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what kvshm has in shared memory (read-only)."
    parser.epilog = (
        "exit status: 0; 1 nothing to show; 2 wrong command line or setting; 3 --check found "
        "something wrong; 4 no engine has that name"
    )
    add = parser.add_argument
    add_selection(parser)
    add(
        "--hash",
        metavar="PREFIX",
        type=_hash_prefix,
        help="list blocks whose hash starts with this",
    )
    add("--leased", action="store_true", help="only leased blocks and the engines that hold them")
    add("--entries", action="store_true", help="list every block, chain and replica entry")
    add(
        "--check",
        action="store_true",
        help="instead of showing, check that shared memory is sound: one line for each invariant "
        "that does not hold, with segment, place and what was found there. No health check: it "
        "does not say whether engines share",
    )


def _what_there_is(run_dir: Path) -> Iterator[str]:
    """A line for each engine of the run directory, shown where nothing else is."""
    engines = [
        f"there is engine {name_of(engine)} of namespace {space['namespace']}"
        for space in cleaned(build_report(run_dir, None, Filters()))["namespaces"]
        for engine in space["engines"]
    ]
    yield from engines or [f"no engine runs in {run_dir}"]


def _check(run_dir: Path, namespace: str | None, as_json: bool) -> int:
    found = check(run_dir, namespace)
    # "law" is what an invariant was once called.  Scripts read the key, so it stays.
    wrong = [{"segment": v.segment, "place": v.place, "law": v.found} for v in found.suspects]
    data = {"checked": found.checked, "violations": wrong, "warnings": found.warnings}
    show(data, lambda: [clean(str(violation)) for violation in found.suspects], as_json=as_json)
    if not as_json:
        note(*(f"warning: {warning}" for warning in found.warnings))
    if found.suspects:
        return 3
    if not found.checked.total():
        note("nothing of kvshm found to check", *_what_there_is(run_dir))
        return 1
    if not as_json:
        checked = ", ".join(f"{n} {kind}" for kind, n in sorted(found.checked.items()))
        print(f"sound: {checked} (of shared memory; this is no health check)")
    return 0


def _show(run_dir: Path, namespace: str | None, asked: argparse.Namespace) -> int:
    filters = Filters(asked.engine, asked.hash or "", asked.leased, asked.entries)
    report = build_report(run_dir, namespace, filters)
    parts = ["engines", "replicas", "unreadable"]
    if not filters.selective:
        parts.append("coordinator")  # a coordinator without engines is worth showing
    empty = not any(space[part] for space in report["namespaces"] for part in parts)
    if empty and asked.engine is not None:
        with NodeReader(run_dir, namespace) as reader:
            select(reader.read(), asked.engine)
    if asked.json or not empty:
        show(
            report,
            lambda: render(cleaned(report), everything=asked.entries, selected=filters.selective),
            as_json=asked.json,
        )
    if empty:
        lines = [line for space in cleaned(report)["namespaces"] for line in ended(space)]
        sought = "was asked for" if filters.selective else "is alive"
        lines.append(f"nothing of kvshm found that {sought}")
        note(*lines, *_what_there_is(run_dir))
    return 1 if empty else 0


def run(asked: argparse.Namespace) -> int:
    if asked.check and (asked.engine or asked.hash or asked.leased or asked.entries):
        raise ConfigError("--check takes no other options than --namespace, --run-dir and --json")
    run_dir, namespace = find_place(asked)
    if asked.check:
        return _check(run_dir, namespace, asked.json)
    return _show(run_dir, namespace, asked)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="kvshm dump")
    add_arguments(parser)
    asked = parser.parse_args()
    sys.exit(run_command("dump", lambda: run(asked)))
