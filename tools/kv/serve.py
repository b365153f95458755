"""``kvshm kv serve``: shows the blocks of a file to running engines, as an engine would.

Engines of the file's fingerprint import from this process as from any peer; it imports nothing.
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

from kvshm._base.fingerprint import KVSHM_ABI
from kvshm._base.ids import BlockHash, Generation
from kvshm._base.log import engine_name
from kvshm._base.roles import Limit
from kvshm._node.protocol import abi
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm.config import Config
from kvshm.errors import ConfigError, KvshmError
from kvshm.halves import BlockId, EngineSpec, Epoch, RankInfo, SchedulerHalf, open_rank
from kvshm.interfaces import Region, SupportsAllocate, load_transport

from ..output import clean
from ..signals import ending_signals
from .block_file import BlockFile, BlockFileError, Description, packed_regions
from .dump import HOST_MEMORY

POLL_SECONDS = 0.1
CHUNK_BYTES = 64 << 20


class _ServedRank:
    def __init__(self, file: BlockFile, rank: int, config: Config, run_dir: Path) -> None:
        """Block ids are the rows of the file.  Raises KvshmError."""
        transport = load_transport(HOST_MEMORY)
        regions, end = packed_regions(file.what.regions[rank], len(file.what.blocks))
        self._memory = cast(SupportsAllocate, transport).allocate(end)
        self._fill(file, rank, regions)
        self.half = open_rank(config, run_dir, rank, transport, self._memory, regions)
        try:
            self._check(file, rank)
        except BlockFileError:
            self.close()
            raise

    def _fill(self, file: BlockFile, rank: int, regions: list[Region]) -> None:
        for name, its_rank, number, nbytes in file.what.tensors():
            if its_rank != rank:
                continue
            rows = max(1, CHUNK_BYTES // nbytes)
            for first in range(0, len(file.what.blocks), rows):
                part: Any = file.rows(name, first, min(first + rows, len(file.what.blocks)))
                at = regions[number].offset + first * nbytes
                self._memory.buffer[at : at + part.nbytes] = memoryview(part).cast("B")

    def _check(self, file: BlockFile, rank: int) -> None:
        """Raise BlockFileError unless every block has the bytes that were dumped."""
        stated = file.what.checksums[rank]
        found = self.half.transport.checksum([BlockId(row) for row in range(len(stated))])
        if damaged := sum(a != b for a, b in zip(stated, found, strict=True)):
            raise BlockFileError(
                f"{file.path} is damaged: {damaged} blocks of rank {rank} do not have the bytes "
                "that were dumped"
            )

    def close(self) -> None:
        self.half.close()
        self._memory.close()


class FileEngine:
    def __init__(self, file: BlockFile, config: Config, run_dir: Path) -> None:
        """Raises KvshmError if there is not enough memory."""
        self._what = file.what
        with ExitStack() as undo:
            self._ranks = [
                undo.enter_context(closing(_ServedRank(file, rank, config, run_dir)))
                for rank in range(len(file.what.regions))
            ]
            count = len(file.what.blocks)
            spec = EngineSpec(
                f"kv-file-{os.getpid()}", _model(file.what), count, file.what.block_size
            )
            self._half = undo.enter_context(closing(SchedulerHalf(config, spec, run_dir)))
            never = Limit("kvshm kv serve", no_exports=False, no_imports=True)
            self._half.role = config.decide_role(never)
            self._undo = undo.pop_all()
        self._shown: object = None

    def open(self) -> None:
        infos = [
            RankInfo(os.getpid(), rank.half.transport.export(Epoch(0))) for rank in self._ranks
        ]
        self._half.open_epoch(infos, lambda: self._what.fields)

    def show(self) -> str | None:
        """Publish all blocks in each new epoch; return the engine's name if one is new."""
        state = self._half.epoch_state
        if state is None or state is self._shown:
            return None
        try:
            for rank in self._ranks:
                rank.half.open_epoch(state.table.epoch)
                rank.half.write_checksums([BlockId(row) for row in range(len(self._what.blocks))])
        except KvshmError:
            self._half.not_opened(state.table.epoch)
            raise
        self._half.publisher.publish(*_records(self._what))
        self._shown = state
        return engine_name(state.table.epoch, state.table.engine, state.table.pid)

    def close(self) -> None:
        self._undo.close()


def _model(what: Description) -> str:
    return what.model.replace("\0", "")


def _records(what: Description) -> tuple[bytes, bytes]:
    records = (
        BlockRecord(BlockHash(b.key), BlockId(row), Generation(0), b.depth, group=b.group)
        for row, b in enumerate(what.blocks)
    )
    return pack_records(records), b"".join(block.parent for block in what.blocks)


def check_servable(what: Description, config: Config) -> None:
    """Raise ConfigError or BlockFileError if no engine could import these blocks from here."""
    if config.decide_role().no_exports:
        raise ConfigError(f"{config.decide_role().no_exports} rules out exporting; unset it")
    if (theirs := what.fields.get(KVSHM_ABI, abi())) != abi():
        raise BlockFileError(
            f"the engine of the file had {KVSHM_ABI} {theirs}, this kvshm has {abi()}: serve "
            f"the file with kvshm {what.kvshm_version}, or dump it again"
        )


def serve(path: Path, config: Config, run_dir: Path) -> int:
    """Serve the file until SIGTERM or SIGINT; return the exit status.  Raises KvshmError."""
    file = BlockFile(path)
    check_servable(file.what, config)
    count, nbytes = len(file.what.blocks), file.what.block_bytes
    # Until the file is read a signal ends the process at once.
    with closing(FileEngine(file, config, run_dir)) as engine, ending_signals() as ended:
        del file  # it is in memory now, and may be changed or removed
        engine.open()
        signals, is_ending = select.poll(), False
        signals.register(ended, select.POLLIN)
        while not is_ending:
            if (name := _show(engine)) is not None:
                print(f"serving {count} blocks of {nbytes} bytes as {name}", flush=True)
            is_ending = bool(signals.poll(1000 * POLL_SECONDS))
    return 0


def _show(engine: FileEngine) -> str | None:
    try:
        return engine.show()
    except KvshmError as exc:  # for example, no descriptors left: the cache tries again
        print(f"kvshm kv serve: {clean(str(exc))}; trying again", file=sys.stderr)
        return None
