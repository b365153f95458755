"""Options that the commands of ``kvshm`` share: which engines are meant, and how to print."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from kvshm._base.rundir import choose_run_directory, open_run_directory
from kvshm.config import Config
from kvshm.errors import KvshmError

from .node.reading import NodeReading


class NoSuchEngine(KvshmError):
    """No engine is called as the user says."""

    def __init__(self, wanted: str, names: Iterable[str]) -> None:
        """``names``: of the engines that there are."""
        there = ", ".join(names) or "none"
        super().__init__(f"no engine is called {wanted!r}; there are: {there}")


def add_selection(parser: argparse.ArgumentParser, *, engine: bool = True) -> None:
    """Add --run-dir, --namespace, --json and, unless told otherwise, --engine."""
    add = parser.add_argument
    if engine:
        add("--engine", metavar="NAME|PID|EPOCH", help="only this engine; an epoch is hexadecimal")
    add("--namespace", help="only this namespace (default: $KVSHM_NAMESPACE, else all; '': all)")
    add("--run-dir", help="where the engines' sockets lie (default: as for engines)")
    add("--json", action="store_true", help="as JSON")


def find_place(asked: argparse.Namespace) -> tuple[Path, str | None]:
    """Return the run directory, checked if it exists, and the namespace that is meant (None: all).

    Reads no other setting, since a command that shows things also helps to find out what is wrong
    with the others.  Raises ConfigError or RunDirectoryError.
    """
    options = {"--namespace": asked.namespace, "--run-dir": asked.run_dir}
    config = Config.of_place(os.environ, options)
    run_dir = choose_run_directory(config.run_dir, os.environ)
    if os.path.exists(run_dir):
        open_run_directory(config.run_dir, os.environ)
    return run_dir, config.namespace if "KVSHM_NAMESPACE" in config.given else None


def select(reading: NodeReading, engine: str | None, *, here: bool = False) -> NodeReading:
    """Return the part of a reading that is meant.  Raises NoSuchEngine, which names those that
    there are."""
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
        yield from (told.engine for told in space.declined)
