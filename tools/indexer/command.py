"""``kvshm indexer``: its command line, and how it looks at engines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress

from kvshm._shm.layout import unpack_records
from kvshm._shm.slot_table import SlotTableView
from kvshm.errors import KvshmError

from ..listening import Place, parse_place
from ..node.reader import NodeReader
from ..options import add_place, read_place
from .query import Cache, Query, answer, found_in
from .server import PATH, IndexerServer

HELP = "answer routers over HTTP which engine holds how much of a prefix"
GROUP = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"Answer POST {PATH}: which engine of this namespace holds how many tokens of a prefix, "
        "whose block hashes are given. The request and the answer are those of Mooncake's indexer "
        "(RFC 1403). Engines notice nothing of this. docs/deployment.md shows a request."
    )
    parser.epilog = (
        "exit status: 0 ended by SIGTERM or SIGINT; 1 it cannot listen there; 2 wrong command line "
        "or setting"
    )
    parser.add_argument(
        "--listen",
        required=True,
        metavar="PATH|[ADDR:]PORT",
        type=parse_local,
        help="a Unix socket, which only this user can use (it has a / in its name), or an address "
        "of the loopback interface, which every user of this machine can use",
    )
    add_place(parser)


def parse_local(text: str) -> Place:
    """Return where only this machine can ask, as an argparse type."""
    place = parse_place(text)
    if not place.is_of_this_machine:
        raise argparse.ArgumentTypeError(
            f"{place.address[0]!r} may be reached from other machines, and answers tell who has "
            "asked what before: give a path or a loopback address (127.0.0.1, ::1)"
        )
    return place


def run(asked: argparse.Namespace) -> int:
    config, run_dir = read_place(asked)
    with NodeReader(run_dir, config.namespace) as reader:
        server = IndexerServer(
            lambda query: answer(query, find_caches(reader, query)), asked.listen
        )
        server.serve("indexer", PATH)
    return 0


def find_caches(reader: NodeReader, query: Query) -> Iterator[Cache]:
    """Yield what each live engine that the reader sees holds of what is asked."""
    wanted = frozenset(query.hashes)
    for space in reader.map_segments():
        for table in (engine.table for engine in space.engines):
            if table is not None and table.alive and not table.died:
                with suppress(KvshmError):  # what contradicts itself is left out
                    yield _cache(table, wanted)


def _cache(table: SlotTableView, wanted: frozenset[bytes]) -> Cache:
    """Read all that it publishes: some milliseconds for 100,000 blocks."""
    records = unpack_records(table.scan())
    keys = (record.block_hash for record in records if record.group == GROUP)
    about = table.engine, table.epoch, table.model, table.fingerprint
    return Cache(*about, table.block_size, table.keeps, found_in(keys, wanted))
