"""An engine without a model or KV memory, for bench_faults.py: a real cache under orders.

As a program it obeys one order per line of standard input and answers with one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshm._base.ids import BlockHash, BlockId, Epoch, LeaseBit, Rank, block_hash
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.marks import Marks, Run
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.protocol import RankInfo
from kvshm._shm.layout import RECORD_BYTES
from kvshm._shm.own_slot_table import RankSlotTable
from kvshm._shm.slot_table import PeerSlotTable
from kvshm.config import Config
from kvshm.interfaces import MemoryDescriptor

BATCH = 512
GROUP = bytes(4)
"""What vLLM appends to a block's hash."""
NAP_SECONDS = 0.0002
"""Between two looks at what another process does, of which nobody tells; the times are as exact."""


def chain(pid: int, begin: int, count: int) -> list[BlockHash]:
    """The hashes under which an engine publishes its blocks, from one on."""
    numbers = range(begin, begin + count)
    return [block_hash(hashlib.sha256(b"%d/%d" % (pid, i)).digest()) for i in numbers]


@dataclass
class Block:
    """What marks ask of a block of the pool."""

    block_id: int
    block_hash: bytes | None = None
    ref_cnt: int = 1


class Engine:
    """A member of the node: it publishes, looks up and leases."""

    def __init__(self, run_dir: str, namespace: str, blocks: int) -> None:
        self.began = time.monotonic()
        config = Config.from_env({"KVSHM_RUN_DIR": run_dir, "KVSHM_NAMESPACE": namespace})
        spec = EngineSpec(f"bench-{os.getpid()}", "bench", blocks, 16, asynchronous=True)
        self.cache = SchedulerHalf(config, spec, Path(run_dir))
        memory = MemoryDescriptor("none", Epoch(0), 0, [])
        ranks = [RankInfo(os.getpid(), memory)]
        self.cache.open_epoch(ranks, lambda: {"weights": "bench"})
        while (table := self.cache.table) is None:
            time.sleep(NAP_SECONDS)
        self.table = table
        RankSlotTable.from_fd(table.name, table.descriptor(True)).set_life(Rank(0))
        while table.lease_bit < 0:
            time.sleep(NAP_SECONDS)
        self.bit = LeaseBit(table.lease_bit)
        self.published = 0
        self.hashes: list[bytes] = []
        self.marks, self.pool = Marks(blocks), [Block(block) for block in range(blocks)]

    def publish(self, count: int) -> None:
        """Show so many more blocks, as those of one prefix."""
        end = self.published + count
        while self.published < end:
            begin, some = self.published, min(BATCH, end - self.published)
            self.hashes += chain(os.getpid(), begin, some)
            blocks = [BlockId(block) for block in range(begin, begin + some)]
            for block in blocks:
                self.pool[block].block_hash = self.hashes[block] + GROUP
            run = Run(self.hashes, begin, self.marks.with_versions(blocks))
            self.cache.publisher.publish_marked(self.marks, self.pool, [run])
            self.published += some

    def found(self, pid: int, begin: int, count: int) -> int:
        """How many of a peer's blocks a lookup names."""
        plan = self.cache.planner.lookup(chain(pid, begin, count), 0, count)
        return plan.num_blocks if plan else 0

    def await_found(self, pid: int, begin: int, count: int) -> float:
        """When that many were named: on the clock that all processes share."""
        while self.found(pid, begin, count) != count:
            time.sleep(NAP_SECONDS)
        return time.monotonic()

    def await_entries(self, count: int) -> float:
        """When the own replica had so many entries."""
        state = self.cache.epoch_state
        assert state is not None
        while state.peers.replica.count != count:
            time.sleep(NAP_SECONDS)
        return time.monotonic()

    def peer(self, epoch: int) -> PeerSlotTable:
        """A peer's slot table, as this engine has it; waits until it has."""
        while True:
            state = self.cache.epoch_state
            tables = state.peers.tables_by_bit().values() if state else ()
            for table in tables:
                if table.epoch == epoch:
                    return table
            time.sleep(NAP_SECONDS)

    def lease(self, epoch: int, begin: int, count: int) -> int:
        """Lease blocks of a peer and keep the leases; returns how many."""
        table = self.peer(epoch)
        records = table.scan()[begin * RECORD_BYTES : (begin + count) * RECORD_BYTES]
        count = table.lease(self.bit, records)[0]
        self.table.count_lease_batch()  # an exporter sees by it that this engine is not slow
        return count

    def facts(self) -> dict[str, Any]:
        facts = {"pid": os.getpid(), "epoch": self.table.epoch, "bit": self.bit}
        return {**facts, "began": self.began}


class Handle:
    """Such an engine in a process of its own."""

    def __init__(self, run_dir: str, namespace: str, blocks: int, resident: float = 0) -> None:
        """``resident``: GiB of private memory that it touches beside."""
        argv = (sys.executable, __file__, run_dir, namespace, str(blocks), str(resident))
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        facts = self.answer()
        self.pid, self.epoch, self.bit = facts["pid"], Epoch(facts["epoch"]), facts["bit"]
        self.began: float = facts["began"]
        """When it began to join, after its imports."""

    def tell(self, what: str, *arguments: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, what: str, *arguments: int) -> Any:
        self.tell(what, *arguments)
        return self.answer()

    def kill(self) -> float:
        """SIGKILL without waiting; returns when it was sent."""
        now = time.monotonic()
        self.process.kill()
        return now

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    run_dir, namespace, blocks, resident = sys.argv[1:5]
    ballast = bytearray(int(float(resident) * (1 << 30)))
    ballast[::4096] = bytes(len(range(0, len(ballast), 4096)))  # each page is touched
    engine = Engine(run_dir, namespace, int(blocks))
    print(json.dumps(engine.facts()), flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(getattr(engine, what)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
