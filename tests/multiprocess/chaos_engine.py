"""A toy engine for chaos.py: it serves until it is told to end, and its ranks are processes."""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from toy_engine import ToyEngine, ToyRank, chain_of

from kvshm._base.ids import BlockHash, BlockId, Epoch
from kvshm._base.rundir import open_run_directory
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.protocol import RankInfo
from kvshm._shm.layout import TABLE_HEADER_BYTES
from kvshm.config import Config
from kvshm.errors import KvshmError
from kvshm.interfaces import MemoryDescriptor

REPORT_SECONDS = 0.5
AGAIN_SECONDS = 1.0
RESET_ODDS = 1 / 500
"""How many requests come after a reset of the cache, which begins another epoch."""
RANK_ENDED = 3
"""Exit status of an engine whose rank has ended."""
CONFUSED_BLOCKS = 2_000_000


class RankEnded(Exception):
    """A rank's process has ended; its status is the argument."""


class Part:
    """A part of a rank, or of one of its parts, in the rank's process."""

    def __init__(self, rank: RemoteRank, path: str) -> None:
        self._rank, self._path = rank, path

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._rank.ask(f"{self._path}{name}", *arguments)


class RemoteRank:
    """A ToyRank in a process of its own, used as if it were here."""

    def __init__(self, rank: int, num_blocks: int, region_bytes: int, model: str) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        numbers = map(str, (theirs.fileno(), rank, num_blocks, region_bytes))
        argv = [sys.executable, __file__, "--rank", *numbers, model]
        self._process = subprocess.Popen(
            argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        self.pid = self._process.pid
        self.transport, self.cache = Part(self, "transport."), Part(self, "cache.")
        self.compute, self.wrong_bytes = Part(self, "").compute, Part(self, "").wrong_bytes

    def ask(self, path: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((path, arguments))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise RankEnded(self._process.wait()) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self._pipe.close()
        self._process.wait()


def serve_rank(pipe: Connection, rank: ToyRank) -> None:
    """Do what the engine asks until it has gone, however that came about."""
    try:
        while True:
            path, arguments = pipe.recv()
            try:
                answer = attrgetter(path)(rank)(*arguments)
            except Exception as exc:
                answer = exc
            pipe.send(answer)
    except (EOFError, OSError):
        rank.cache.close()


class ChaosEngine(ToyEngine):
    """Serves on whatever comes: an epoch that cannot begin is tried again later."""

    def make_rank(self, rank: int, num_blocks: int, region_bytes: int) -> Any:
        return RemoteRank(rank, num_blocks, region_bytes, self.model)

    opened: int | None = None
    again_at = 0.0
    unshared = 0
    contained = 0
    from_keepers = 0

    def step(self, chain: list[BlockHash]) -> None:
        """One request.  No failure of the cache crosses this line, as none crosses
        hooks/boundary.py; here the engine then begins anew."""
        try:
            self.follow_epoch()
            self.request(chain)
        except RankEnded:
            raise
        except Exception:
            traceback.print_exc()
            self.contained += 1
            self.reset()

    def follow_epoch(self) -> None:
        """Begin an epoch if there is none, and open it on the ranks once it is there."""
        table = self.cache.table
        if table is not None and table.epoch != self.opened:
            self.opened = table.epoch
            try:
                self.open_ranks()
            except KvshmError as exc:
                print(f"unshared: {exc!r}", file=sys.stderr, flush=True)
                self.unshared += 1
                self.reset()
        elif (table is None and self.opened is not None) or self.cache.failed:
            self.begin_again()

    def begin_again(self) -> None:
        if time.monotonic() >= self.again_at:
            self.again_at, self.opened = time.monotonic() + AGAIN_SECONDS, None
            self.open(wait=False)

    def _import(self, plan: Any, targets: list[BlockId], chain: list[BlockHash]) -> int:
        """Counts those that have come from keepers, too, whose bytes were compared like all."""
        good = super()._import(plan, targets, chain)
        keeps = [run.peer.table.keeps for run in plan.runs for _ in range(run.num_blocks)]
        self.from_keepers += sum(keeps[:good])
        return good

    def reset(self) -> None:
        """Forget all blocks, as vLLM does at a reset of its prefix cache."""
        for part in (self, *self.ranks):
            try:
                part.cache.end_epoch()
            except Exception as exc:
                print(f"an epoch did not end: {exc!r}", file=sys.stderr, flush=True)
        self.by_hash.clear()
        self.marks.clear_all()
        self.lru.update(dict.fromkeys(self.lru))
        self.opened = self.opened or 0

    def summary(self) -> dict[str, object]:
        return {
            **super().summary(),
            "peers": self.num_peers,
            "unshared": self.unshared,
            "contained": self.contained,
            "from_keepers": self.from_keepers,
            "epoch": f"{table.epoch if (table := self.cache.table) else 0:016x}",
        }

    def close(self) -> None:
        super().close()
        for rank in self.ranks:
            rank.end()  # type: ignore[attr-defined]


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def orders() -> queue.SimpleQueue[str]:
    """What comes on standard input; its end is the order to end, and so is SIGTERM."""
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            heard.put(line.strip())
        heard.put("end")

    threading.Thread(target=listen, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: heard.put("end"))
    return heard


def serve(engine: ChaosEngine, heard: queue.SimpleQueue[str], options: argparse.Namespace) -> None:
    dice, report_at = random.Random(options.seed), 0.0
    engine.open(wait=False)
    while True:
        order = "" if heard.empty() else heard.get()
        while order == "pause":
            say(paused=True, **engine.summary())
            order = heard.get()
        if order == "end":
            say(**engine.summary())
            return
        if dice.random() < RESET_ODDS:
            engine.reset()
        wrong = engine.wrong
        family, length = dice.randrange(options.families), dice.randint(2, options.blocks // 2)
        engine.step(chain_of(family, length))
        if time.monotonic() >= report_at or engine.wrong > wrong:
            say(**engine.summary())
            report_at = time.monotonic() + REPORT_SECONDS
        time.sleep(options.pause)


def confused() -> None:
    """Join with a slot table of many blocks whose memory has been taken away again."""
    config = Config.from_env(os.environ)
    place = open_run_directory(config.run_dir, os.environ)
    cache = SchedulerHalf(config, EngineSpec("confused", "toy", CONFUSED_BLOCKS, 16), place)
    memory = MemoryDescriptor("none", Epoch(0), 0, [])
    cache.open_epoch([RankInfo(os.getpid(), memory)], lambda: {"weights": "toy"})
    while (table := cache.table) is None:
        time.sleep(0.01)
    mapping = table._segment.buffer.obj
    assert isinstance(mapping, mmap.mmap)
    mapping.madvise(mmap.MADV_REMOVE, TABLE_HEADER_BYTES)
    say(sparse=True)
    sys.stdin.read()


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        fd, rank, num_blocks, region_bytes = map(int, sys.argv[2:6])
        config = Config.from_env(os.environ)
        toy = ToyRank(config, rank, num_blocks, region_bytes, sys.argv[6])
        return serve_rank(Connection(fd), toy)
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--families", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--region-bytes", type=int, default=65536)
    parser.add_argument("--pause", type=float, default=0.002, help="seconds between requests")
    parser.add_argument("--confused", action="store_true", help="join with a sparse table")
    options = parser.parse_args()
    if options.confused:
        return confused()
    heard = orders()
    engine = ChaosEngine(options.blocks, options.ranks, options.region_bytes)
    say(ranks=[rank.pid for rank in engine.ranks])
    try:
        serve(engine, heard, options)
    except RankEnded as exc:
        say(rank_ended=exc.args[0])
        engine.cache.close()
        os._exit(RANK_ENDED)
    engine.close()
    return None


if __name__ == "__main__":
    main()
