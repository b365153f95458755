"""Options that the commands of ``kvshm`` share: which engines are meant, and how to print."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvshm._base.rundir import choose_run_directory, open_run_directory
from kvshm.config import Config
from kvshm.errors import KvshmError

from .node.reading import NodeReading

Number = TypeVar("Number", int, float)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+)([KMGT]?)B?")


class NoSuchEngine(KvshmError):
    """No engine has the name that the user gives."""

    def __init__(self, wanted: str, names: Iterable[str]) -> None:
        there = ", ".join(names) or "none"
        super().__init__(f"no engine is called {wanted!r}; there are: {there}")


def number(
    kind: Callable[[str], Number], is_good: Callable[[Number], bool], wanted: str
) -> Callable[[str], Number]:
    """Return an argparse type of good numbers, of which ``wanted`` says to users what they are."""
    whole = "a whole number" if kind is int else "a number"

    def parse(text: str) -> Number:
        with suppress(ValueError):
            if is_good(found := kind(text)):
                return found
        raise argparse.ArgumentTypeError(f"{text!r} is not {whole} {wanted}")

    return parse


def parse_size(text: str) -> int:
    """Return bytes: a whole number, with K, M, G or T for the powers of 1024."""
    found = _SIZE.fullmatch(text.strip().upper().replace("IB", "B"))
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 8G or 512M")
    return int(found[1]) << _UNITS[found[2]]


def add_selection(parser: argparse.ArgumentParser, *, engine: bool = True) -> None:
    """Add --run-dir, --namespace, --json and, unless ``engine`` is false, --engine."""
    add = parser.add_argument
    if engine:
        add("--engine", metavar="NAME|PID|EPOCH", help="only this engine; an epoch is hexadecimal")
    add_place(parser, "only this namespace (default: $KVSHM_NAMESPACE, else all; '': all)")
    add("--json", action="store_true", help="as JSON")


def add_place(
    parser: argparse.ArgumentParser, namespace: str = "of which engines (default: $KVSHM_NAMESPACE)"
) -> None:
    """Add --namespace, with this help, and --run-dir."""
    parser.add_argument("--namespace", help=namespace)
    parser.add_argument("--run-dir", help="where their sockets lie (default: as for engines)")


def read_place(asked: argparse.Namespace) -> tuple[Config, Path]:
    """Return the settings of the place that is meant, and its run directory, which need not exist.
    Reads no other setting, which may be the one that is wrong.  Raises ConfigError."""
    options = {"--namespace": asked.namespace, "--run-dir": asked.run_dir}
    config = Config.of_place(os.environ, options)
    return config, choose_run_directory(config.run_dir, os.environ)


def given_namespace(config: Config) -> str | None:
    """None: all are meant."""
    return config.namespace if "KVSHM_NAMESPACE" in config.given else None


def find_place(asked: argparse.Namespace) -> tuple[Path, str | None]:
    """Return the run directory, checked if it exists, and the namespace that is meant (None: all).
    Raises KvshmError."""
    config, run_dir = read_place(asked)
    if os.path.exists(run_dir):
        open_run_directory(config.run_dir, os.environ)
    return run_dir, given_namespace(config)


def select(reading: NodeReading, engine: str | None, *, here: bool = False) -> NodeReading:
    """Return the part of a reading that is meant.  Raises NoSuchEngine."""
    if engine is None and not here:
        return reading

    def is_meant(names: tuple[str, ...], is_here: bool) -> bool:
        return (is_here or not here) and (engine is None or engine in names)

    chosen = [space.only(is_meant) for space in reading.namespaces]
    spaces = [s for s in chosen if s.engines or s.declined or s.ended or s.unreadable]
    if engine is not None and not spaces:
        raise NoSuchEngine(engine, _all_names(reading))
    return replace(reading, namespaces=tuple(spaces))


def _all_names(reading: NodeReading) -> Iterator[str]:
    yield from (engine.label for engine in reading.engines)
    for space in reading.namespaces:
        yield from (space.name_of(epoch) for epoch in space.unreadable)
        yield from (record.engine for record in space.declined)
