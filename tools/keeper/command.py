"""``kvshm keeper``: its command line, and the loop around it."""

from __future__ import annotations

import argparse
import mmap
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvshm._api.arguments import checked_name
from kvshm._base.rundir import open_run_directory
from kvshm.config import Config, Share
from kvshm.errors import ConfigError, MisuseError

from ..options import add_place, number, parse_size
from ..output import EXIT_FAILED, clean
from ..signals import ending_signals
from .keeper import Keeper, Limits
from .numa import bind_memory

if TYPE_CHECKING:
    from ..kv.kept_files import Files
    from .store import Store

HELP = "keep what engines have computed, in memory of its own"
NICE = 10
"""Engines come first."""


def _name(text: str) -> str:
    try:
        return checked_name(text)
    except MisuseError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Join as an engine that computes nothing: copy what the engines of a namespace publish "
        "into memory of its own, and let them import it from there when they have lost it, also "
        "after all of them were started again. As long as there is room everything is kept; then "
        "what was used twice, in place of what was not used for longest. Engines never wait for "
        "it, and it may be stopped or killed at any time. Blocks of engines on a GPU are kept in "
        "host memory, too, if this process can use a GPU."
    )
    parser.epilog = (
        "exit status: 0 ended by SIGTERM or SIGINT; 1 it cannot serve, or not all could be written "
        "into --files; 2 wrong command line or setting, or another keeper has that folder"
    )
    add = parser.add_argument
    add("--memory", type=parse_size, required=True, metavar="SIZE", help="for blocks, as 8G")
    add(
        "--rate",
        type=parse_size,
        default=256 << 20,
        metavar="SIZE",
        help="how much to copy in a second at most; a block counts as 512K at least (256M)",
    )
    add(
        "--give-way-after",
        type=number(float, lambda s: s >= 0, "of at least 0 seconds"),
        default=600.0,
        metavar="S",
        help="if memory is short, drop blocks that engines of another kind need, once no engine "
        "could use them for this long (600)",
    )
    add(
        "--files",
        type=Path,
        metavar="FOLDER",
        help="write all blocks into files there at the end (SIGTERM, SIGINT), and read and remove "
        "them at the next start: for a reboot; of one keeper at a time",
    )
    add(
        "--store",
        type=Path,
        metavar="FILE",
        help="be the node's one client of a Mooncake Store, with the settings in this file: write "
        "through to it what is kept, and fetch what an engine asks for and nobody on the node has",
    )
    add(
        "--numa-node",
        type=number(int, lambda n: n >= 0, "of a node"),
        metavar="N",
        help="take the memory for blocks from this NUMA node (default: as the kernel does)",
    )
    add("--name", type=_name, help="for people (default: keeper-PID)")
    add_place(parser)


def run(asked: argparse.Namespace) -> int:
    options = {"--namespace": asked.namespace, "--run-dir": asked.run_dir}
    config = Config.from_env(os.environ, options)
    decision = config.decide_role()
    refused: object = decision.no_exports or decision.no_imports
    if config.share is Share.SALTED_ONLY:
        refused = "KVSHM_SHARE=salted-only"
    if refused:
        raise ConfigError(f"{refused} rules out what a keeper does; unset it")
    open_run_directory(config.run_dir, os.environ)
    if asked.memory < mmap.PAGESIZE:
        raise ConfigError(f"--memory {asked.memory}: a page has {mmap.PAGESIZE} bytes; give as 8G")
    limits = Limits(asked.memory, asked.rate, asked.give_way_after)
    if asked.files is not None and asked.store is not None:
        raise ConfigError(
            "--files and --store: give one of them; after a restart a keeper fetches from its store"
        )
    name = asked.name or f"keeper-{os.getpid()}"
    files = _files(asked.files, name) if asked.files is not None else None
    store = _store(asked.store) if asked.store is not None else None
    if asked.numa_node is not None:
        _bind(asked.numa_node)
    with suppress(OSError):
        os.nice(NICE)
    return keep(config, limits, name, files, store)


def _files(folder: Path, name: str) -> Files:
    from ..kv.kept_files import Files  # needs packages that a keeper without files does not

    return Files(folder, name, _say)


def _store(path: Path) -> Store:
    from .mooncake import MooncakeStore, read_settings

    return MooncakeStore(read_settings(path))


def _bind(node: int) -> None:
    try:
        bind_memory(node)
    except OSError as exc:
        raise ConfigError(f"--numa-node {node}: {exc.strerror}") from exc


def keep(
    config: Config, limits: Limits, name: str, files: Files | None, store: Store | None
) -> int:
    """Keep blocks until SIGTERM or SIGINT; return the exit status.  Raises KvshmError."""
    with (
        ending_signals() as ended,
        closing(Keeper(config, limits, name, time.monotonic(), _say)) as keeper,
        _tier(config, store, keeper) as wakes,
    ):
        if files is not None:
            keeper.read(files)
        _say(f"{name} has {limits.memory} bytes for blocks of namespace {config.namespace}")
        waiting = select.poll()
        for each in (ended.fileno(), *wakes):
            waiting.register(each, select.POLLIN)
        pause = 0.0
        while ended.fileno() not in dict(waiting.poll(1000 * pause)):
            pause = keeper.go_round(time.monotonic())
        if files is not None and not keeper.write(files):
            return EXIT_FAILED
    return 0


@contextmanager
def _tier(config: Config, store: Store | None, keeper: Keeper) -> Iterator[Sequence[int]]:
    """Have the keeper use a store, if there is one.  Yields the descriptors that wake it."""
    if store is None:
        yield ()
        return
    from .desk import Desk
    from .store_tier import StoreTier

    run_dir = open_run_directory(config.run_dir, os.environ)
    with (
        closing(Desk(run_dir, config.namespace)) as desk,
        closing(StoreTier(store, desk, keeper, time.monotonic, _say)) as tier,
    ):
        keeper.use_store(tier)
        yield tier.wakes


def _say(text: str) -> None:
    try:
        print(clean(text), flush=True)
    except OSError:  # nobody reads it any more, or the disk is full: the blocks are worth more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
