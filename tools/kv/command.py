"""``kvshm kv``: its command line.  Needs numpy and safetensors: ``pip install 'kvshm[kv]'``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from kvshm._base.log_output import shown_on_stderr
from kvshm._base.rundir import open_run_directory
from kvshm.config import Config
from kvshm.errors import ConfigError, KvshmError

from ..options import add_place, number
from ..output import clean
from .number_formats import DTYPES

HELP = "write blocks to a file, show them to engines, compare them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Blocks of KV caches in files. They are what a prompt became: private data."
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs", required=True)
    dump = verbs.add_parser(
        "dump",
        help="write published blocks of a running engine to a file",
        epilog="exit status: 0; 1 nothing was written; 2 wrong command line or setting; "
        "4 no engine has that name",
    )
    dump.add_argument("file", metavar="FILE", type=Path, help="only its owner can read it")
    dump.add_argument("--engine", metavar="NAME|PID|EPOCH", help="default: the only one there is")
    dump.add_argument("--model", help="only an engine that serves this model")
    dump.add_argument(
        "--keys",
        metavar="HEX,...",
        help="only blocks whose keys start with these, and all blocks before them in their "
        "prompts; @FILE has one in each line",
    )
    count = number(int, lambda n: n >= 1, "of at least 1")
    dump.add_argument("--limit", metavar="N", type=count, help="how many blocks at most")
    dump.add_argument("--force", action="store_true", help="replace the file if it exists")
    add_place(dump)
    serve = verbs.add_parser(
        "serve",
        help="show a file's blocks to engines of the same fingerprint, until SIGTERM",
        epilog="exit status: 0 ended by SIGTERM or SIGINT; 1 the file cannot be served; 2 wrong "
        "command line or setting",
    )
    serve.add_argument("file", metavar="FILE", type=Path, help="what kvshm kv dump has written")
    add_place(serve)
    compare = verbs.add_parser(
        "compare",
        help="say how much the blocks of two files differ",
        epilog="exit status: 0 equal; 1 different; 2 nothing to compare, or wrong command line",
    )
    compare.add_argument(
        "files", metavar="FILE", nargs=2, type=Path, help="two that kvshm kv dump has written"
    )
    compare.add_argument(
        "--dtype", choices=list(DTYPES), help="default: as the fingerprint's fields say"
    )
    compare.add_argument(
        "--tolerance",
        metavar="ERROR",
        type=number(float, lambda x: x >= 0, "of at least 0"),
        help="numbers that differ by no more are equal (default: all bytes have to be equal)",
    )
    compare.add_argument(
        "--any-fingerprint",
        action="store_true",
        help="compare files of engines that differ, if their blocks have the same sizes",
    )
    compare.add_argument("--json", action="store_true", help="as JSON")


def _read_place(asked: argparse.Namespace) -> tuple[Config, Path]:
    options = {"--namespace": asked.namespace, "--run-dir": asked.run_dir}
    config = Config.from_env(os.environ, options)
    return config, open_run_directory(config.run_dir, os.environ)


def _dump(asked: argparse.Namespace) -> int:
    from . import block_file, dump

    try:
        keys = [] if asked.keys is None else dump.parse_keys(asked.keys)
    except (ValueError, OSError) as exc:
        raise ConfigError(f"--keys: {exc}") from exc
    config, run_dir = _read_place(asked)
    block_file.refuse_existing(asked.file, force=asked.force)
    wanted = dump.Wanted(asked.engine, asked.model, keys, asked.limit)
    found = dump.read_engine(run_dir, config.namespace, wanted)
    block_file.write(asked.file, found.what, found.arrays, force=asked.force)
    left = f"; {found.changed} were reused meanwhile and left out" if found.changed else ""
    what = f"{asked.file}: {len(found.what.blocks)} blocks of engine {found.what.engine}{left}"
    print(clean(what))
    return 0


def _serve(asked: argparse.Namespace) -> int:
    from . import serve

    config, run_dir = _read_place(asked)
    with shown_on_stderr(config.log_level):
        return serve.serve(asked.file, config, run_dir)


def _compare(asked: argparse.Namespace) -> int:
    from . import compare

    how = compare.How(asked.dtype, asked.tolerance, asked.any_fingerprint)
    try:
        return compare.main((asked.files[0], asked.files[1]), how, as_json=asked.json)
    except (KvshmError, MemoryError) as exc:
        print(f"kvshm kv compare: {clean(str(exc)) or 'not enough memory'}", file=sys.stderr)
        return compare.NOT_COMPARED


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "dump": _dump,
    "serve": _serve,
    "compare": _compare,
}


def run(asked: argparse.Namespace) -> int:
    return VERBS[asked.verb](asked)
