"""An engine without vLLM: a real process with a real slot table and a real client."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation, LeaseBit, Rank
from kvshm._base.rundir import engine_socket
from kvshm._node.coordinator_client import CoordinatorClient
from kvshm._node.protocol import (
    EngineGone,
    EngineInfo,
    EngineJoined,
    EngineRecovered,
    EngineSuspected,
    IncompatibleJoined,
    Joined,
    RankInfo,
    Refused,
    Tick,
)
from kvshm._node.segment_server import SegmentClient, SegmentServer, serve_epoch
from kvshm._node.updates import Coordinator, EventBatches, EventsLost, Update
from kvshm._replica.index import Replica
from kvshm._shm.layout import BlockRecord, pack_records, unpack_records
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm._shm.slot_table import PeerSlotTable
from kvshm.interfaces import MemoryDescriptor
from kvshm.version import __version__

NUM_BLOCKS = 64

WORKER = """
import sys
from pathlib import Path
from kvshm._node.segment_server import SegmentClient
segments, rank, table = SegmentClient(Path(sys.argv[1]), sys.argv[2]), int(sys.argv[3]), None
for epoch in sys.stdin:
    table = segments.rank_table(int(epoch))  # the one before goes
    table.begin_pulse(rank)
    table.set_life(rank)
    print(flush=True)
"""


def say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def block_hash(block: int, name: str) -> BlockHash:
    return BlockHash(f"{name}/{block}".encode().ljust(32, b"\0"))


class Engine:
    """An engine that says what it is told, and keeps a toy replica by scanning tables."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.segments = SegmentClient(options.run_dir, options.namespace)
        self.peers: dict[int, PeerSlotTable] = {}
        self.replica: dict[int, set[int]] = {}
        self.workers = [self._worker(rank) for rank in range(1, options.ranks)]
        self.bit = LeaseBit(-1)
        self.failing: set[str] = set()
        self.num_incompatible = 0
        self.begin_epoch()

    def _worker(self, rank: int) -> subprocess.Popen[bytes]:
        """A process that has the engine's tables until it is killed, or its engine ends."""
        options = self.options
        command = [sys.executable, "-c", WORKER, str(options.run_dir), options.namespace, str(rank)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def begin_epoch(self) -> None:
        options = self.options
        self.epoch = Epoch(options.epoch or secrets.randbits(63) + 1)
        options.epoch = 0
        spec = TableSpec(
            namespace=options.namespace,
            engine=options.name,
            num_blocks=NUM_BLOCKS,
            block_size=16,
            num_ranks=1 + len(self.workers),
            fingerprint=Fingerprint(options.fingerprint.encode().ljust(32, b"\0")),
        )
        self.table = OwnSlotTable.create(spec, self.epoch)
        self.table.begin_pulse(None)
        rank = RankSlotTable.from_fd(self.table.name, self.table.descriptor(True))
        rank.set_life(Rank(0))
        rank.close()
        index = Replica.create(options.namespace, options.name, self.epoch, NUM_BLOCKS)
        path = engine_socket(options.run_dir, options.namespace, self.epoch)
        self.server = serve_epoch(path, self.table, index)
        for worker in self.workers:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(b"%d\n" % self.epoch)
            worker.stdin.flush()
            assert worker.stdout.readline()

    def new_epoch(self) -> None:
        """As an engine does it: whoever has the old table finds that nothing in it counts."""
        old, server = self.table, self.server
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        self.begin_epoch()
        self._withdraw(old, server)

    def end(self) -> None:
        self._withdraw(self.table, self.server)

    @staticmethod
    def _withdraw(table: OwnSlotTable, server: SegmentServer) -> None:
        table.retire()
        table.end_life(None)
        server.close()

    hears, deaf = threading.Event(), threading.Event()
    hears.set()

    # -- UpdateHandler

    def describe(self) -> EngineInfo:
        pids = [os.getpid(), *(worker.pid for worker in self.workers)]
        return EngineInfo(
            epoch=self.options.claim_epoch or self.epoch,
            name=self.options.name,
            pid=os.getpid(),
            fingerprint=Fingerprint(self.options.fingerprint.encode().ljust(32, b"\0")),
            fields=json.loads(self.options.fields),
            num_blocks=NUM_BLOCKS,
            ranks=[
                RankInfo(pid, MemoryDescriptor("none", self.epoch, rank, []))
                for rank, pid in enumerate(pids)
            ],
            kvshm_version=__version__,
        )

    def apply(self, update: Update) -> None:
        if type(update).__name__ in self.failing:
            raise RuntimeError("told to fail")
        match update:
            case EngineJoined(engine=info):
                self._attach(info)
                say(
                    "engine_joined", name=info.name, epoch=info.epoch, blocks=self._held(info.epoch)
                )
            case EngineGone(epoch=epoch):
                table = self.peers.pop(epoch, None)
                usable = table is not None and any(map(table.is_alive, range(table.num_ranks)))
                say("engine_gone", epoch=epoch, reason=update.reason, usable=usable)
            case EventBatches(batches):
                for epoch, records in batches:
                    self.replica[epoch] |= {r.block_id for r in unpack_records(records)}
                    say("engine_events", epoch=epoch, blocks=self._held(epoch))
            case EventsLost(epoch):
                self._scan(epoch)
                say("rescan", epoch=epoch, blocks=self._held(epoch))
            case _:
                self._say(update)

    def _say(self, update: Update) -> None:
        match update:
            case Joined():
                self.bit = LeaseBit(update.lease_bit)
                self.table.set_lease_bit(self.bit)
                say(
                    "joined",
                    bit=update.lease_bit,
                    epoch=self.epoch,
                    coordinator=update.coordinator_epoch,
                    roster=sorted(info.name for info in update.roster),
                    incompatible=[[e.name, e.differences] for e in update.incompatible],
                )
            case Refused():
                say("refused", reason=update.reason, remedy=update.remedy, retry=update.retry)
            case IncompatibleJoined(engine=other):
                say("incompatible_joined", name=other.name, differences=other.differences)
            case Tick(num_incompatible=count) if count != self.num_incompatible:
                self.num_incompatible = count
                say("incompatible_counted", count=count)
            case Coordinator():
                say(f"coordinator_{update.value}")
            case EngineSuspected(epoch=epoch):
                say("engine_suspected", epoch=epoch)
            case EngineRecovered(epoch=epoch):
                say("engine_recovered", epoch=epoch)

    def scan_again(self, enough: Callable[[], bool]) -> None:
        """It has scanned when it was told."""

    def count(self, counter: int, amount: int = 1) -> None:
        self.table.counters.add(counter, amount)

    def beat(self) -> None:
        self.table.beat()
        if not self.hears.is_set():
            self.deaf.set()
            self.hears.wait()

    def _attach(self, info: EngineInfo) -> None:
        table = self.segments.roster_table(info.epoch, info.num_blocks, len(info.ranks))
        self.peers[info.epoch] = table
        self._scan(info.epoch)

    def _scan(self, epoch: int) -> None:
        table = self.peers[epoch]
        self.replica[epoch] = {record.block_id for record in unpack_records(table.scan())}

    def _held(self, epoch: int) -> list[int]:
        return sorted(self.replica[epoch])

    # -- what tests ask for

    def publish(self, blocks: list[int]) -> bytes:
        records = pack_records(
            BlockRecord(block_hash(b, self.options.name), BlockId(b), Generation(0), 0)
            for b in blocks
        )
        return self.table.publish(records, bytes(8 * len(blocks)))

    def lease(self, epoch: int) -> int:
        """Lease every READY block of a peer, for good."""
        table = self.segments.peer_table(epoch)
        return table.lease(self.bit, table.scan())[0]

    @staticmethod
    def fork(client: CoordinatorClient) -> int:
        """Use the client in a forked child; return the child's exit status."""
        child = os.fork()
        if child == 0:
            client.send_events(bytes(48))
            client.rejoin()
            client.close()
            os._exit(3 if client.is_member else 0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def obey(self, client: CoordinatorClient, order: dict[str, Any]) -> None:
        match order["do"]:
            case "publish":
                client.send_events(self.publish(order["blocks"]))
            case "lease":
                say("leased", blocks=self.lease(order["epoch"]))
            case "new-epoch":
                self.new_epoch()
                client.rejoin()
            case "be-deaf":
                self.deaf.clear()
                self.hears.clear()
                self.deaf.wait()  # until the client's thread stands still
            case "hear":
                self.hears.set()
            case "fail":
                self.failing.add(order["update"])
            case "fork":
                say("forked", status=self.fork(client))
        say("done", what=order["do"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--fingerprint", default="same")
    parser.add_argument("--fields", default="{}")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--claim-epoch", type=int, default=0)
    options = parser.parse_args()
    engine = Engine(options)
    workers = [worker.pid for worker in engine.workers]
    say("started", workers=workers, epoch=engine.epoch, pid=os.getpid())
    client = CoordinatorClient(options.run_dir, options.namespace, engine)
    for line in sys.stdin:
        engine.obey(client, json.loads(line))
    engine.end()
    client.close()
    say("ended")


if __name__ == "__main__":
    main()
