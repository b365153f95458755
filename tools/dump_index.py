"""Shows what kvshm has in shared memory: ``python -m kvshm.tools.dump_index``.

Works on a running node, without a coordinator and after a crash; maps everything read-only.
Run it as the engines' user and in their pid namespace, else living engines look dead.
Exit status: 0, 1 if there is nothing to show, 2 for a wrong command line or setting, 3 if
``--check`` found something wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import string
import sys
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__" and not __package__:  # started as a file
    __package__ = "kvshm.tools"

from kvshm.config import Config
from kvshm.errors import ConfigError

from .check import check
from .render import render
from .report import Filters, describe
from .snapshot import take


def _hash_prefix(text: str) -> str:
    digits = text.lower().removeprefix("0x")
    if not digits or not set(digits) <= set(string.hexdigits):
        raise argparse.ArgumentTypeError(f"{text!r} is not the beginning of a hexadecimal hash")
    return digits


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dump_index",
        description="Show what kvshm has in shared memory (read-only).",
        epilog="exit status: 0; 1 nothing to show; 2 wrong command line or setting; 3 --check "
        "found something wrong",
    )
    add = parser.add_argument
    add("--engine", metavar="NAME|PID|EPOCH", help="only this engine; an epoch is hexadecimal")
    add("--hash", metavar="PREFIX", type=_hash_prefix, help="list blocks whose hash begins so")
    add("--leased", action="store_true", help="only leased blocks and who holds them")
    add("--namespace", help="only this namespace (default: $KVSHM_NAMESPACE, else all; '': all)")
    add("--entries", action="store_true", help="list every block, chain and replica entry")
    add("--json", action="store_true", help="as JSON")
    add(
        "--check",
        action="store_true",
        help="instead of showing, check that everything is sound; one line for each law that "
        "does not hold: segment, place, law",
    )
    return parser


def _namespace(asked: str | None) -> str | None:
    """The namespace to show; None: all.  Raises ConfigError.  Of the settings only this one is
    looked at: a dump is also for finding out what is wrong with the others."""
    name = os.environ.get("KVSHM_NAMESPACE") if asked is None else asked
    return Config.from_env({"KVSHM_NAMESPACE": name}).namespace if name else None


def _check(namespace: str | None, as_json: bool) -> int:
    """Print what is wrong; return the exit status."""
    found = check(namespace)
    if as_json:
        wrong = [{"segment": v.segment, "place": v.place, "law": v.law} for v in found.suspects]
        told = {"checked": found.checked, "violations": wrong, "warnings": found.warnings}
        print(json.dumps(told, indent=2))
    else:
        for violation in found.suspects:
            print(violation)
        for warning in found.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    if found.suspects:
        return 3
    if not found.checked:
        print("nothing of kvshm found to check", file=sys.stderr)
        return 1
    if not as_json:
        print("sound: " + ", ".join(f"{n} {kind}" for kind, n in sorted(found.checked.items())))
    return 0


def _is_empty(report: dict[str, Any]) -> bool:
    parts = ("engines", "replicas", "unreadable", "lease_table")
    return not any(space[part] for space in report["namespaces"] for part in parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report that the command line asks for; return the exit status."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.check and (asked.engine or asked.hash or asked.leased or asked.entries):
        parser.error("--check takes no other options than --namespace and --json")
    try:
        namespace = _namespace(asked.namespace)
    except ConfigError as exc:
        print(f"dump_index: {exc}", file=sys.stderr)
        return 2
    if asked.check:
        return _check(namespace, asked.json)
    filters = Filters(asked.engine, asked.hash, asked.leased, asked.entries)
    taken = take(namespace, with_entries=asked.entries or asked.hash is not None)
    report = describe(taken, filters)
    if asked.json:
        print(json.dumps(report, indent=2))
    elif not _is_empty(report):
        print(render(report, everything=asked.entries))
    if _is_empty(report):
        print("nothing of kvshm found that was asked for", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
