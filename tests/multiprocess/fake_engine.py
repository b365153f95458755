"""An engine without vLLM: a real process with a real slot table and a real client.

It says what the coordinator tells it, one JSON object per line, and does what it is told on
standard input, one JSON object per line.  Run by tests only.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvshm.client import CoordinatorClient
from kvshm.interfaces import MemoryDescriptor
from kvshm.protocol import EngineInfo, Joined, RankInfo, Refused, Stranger
from kvshm.records import BlockRecord, pack_records, unpack_records
from kvshm.segment import Identity, identity_of, is_alive
from kvshm.slots import SlotTable, TableSpec
from kvshm.terms import BlockHash, BlockId, Epoch, Fingerprint, Generation, LeaseBit, Rank
from kvshm.version import __version__

NUM_BLOCKS = 64


def say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def block_hash(block: int, name: str) -> BlockHash:
    return BlockHash(f"{name}/{block}".encode().ljust(32, b"\0"))


class Engine:
    """A member that says what it is told, and keeps a toy replica by scanning tables."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.peers: dict[int, str] = {}
        self.replica: dict[int, set[int]] = {}
        self.ranks = [identity_of()] + [self._rank() for _ in range(options.ranks - 1)]
        self.bit = LeaseBit(-1)
        self.failing: set[str] = set()
        self.begin_epoch()

    @staticmethod
    def _rank() -> Identity:
        """A worker rank: a process that lives until it is killed, or its engine ends."""
        code = "import sys; sys.stdin.read()"
        rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        return identity_of(rank.pid)

    def begin_epoch(self) -> None:
        options = self.options
        self.epoch = Epoch(options.epoch or secrets.randbits(63) + 1)
        options.epoch = 0
        spec = TableSpec(
            namespace=options.namespace,
            engine=options.name,
            num_blocks=NUM_BLOCKS,
            block_size=16,
            num_ranks=len(self.ranks),
            fingerprint=Fingerprint(options.fingerprint.encode().ljust(32, b"\0")),
        )
        self.table = SlotTable.create(spec, self.epoch, identity_of())
        for rank in range(len(self.ranks)):
            self.table.set_life(Rank(rank))

    hears, deaf = threading.Event(), threading.Event()
    hears.set()

    # -- Member

    def describe(self) -> EngineInfo:
        identity = identity_of()
        return EngineInfo(
            epoch=self.epoch,
            name=self.options.name,
            pid=self.options.claim_pid or identity.pid,
            start_time=identity.start_time,
            fingerprint=self.table.fingerprint,
            fields=json.loads(self.options.fields),
            table=self.options.claim_table or self.table.name,
            num_blocks=NUM_BLOCKS,
            ranks=[
                RankInfo(r.pid, r.start_time, MemoryDescriptor("none", self.epoch, i, [], {}))
                for i, r in enumerate(self.ranks)
            ],
            kvshm_version=__version__,
        )

    def joined(self, reply: Joined) -> None:
        self.bit = LeaseBit(reply.lease_bit)
        self.table.lease_bit = self.bit
        say(
            "joined",
            bit=reply.lease_bit,
            epoch=self.epoch,
            table=self.table.name,
            coordinator=reply.coordinator_epoch,
            roster=sorted(info.name for info in reply.roster),
            strangers=[[s.name, s.differences] for s in reply.strangers],
        )

    def engine_joined(self, info: EngineInfo) -> None:
        if "engine_joined" in self.failing:
            raise RuntimeError("told to fail")
        self.peers[info.epoch] = info.table
        self._scan(info.epoch)
        say("engine_joined", name=info.name, epoch=info.epoch, blocks=self._held(info.epoch))

    def engine_suspected(self, epoch: int) -> None:
        say("engine_suspected", epoch=epoch)

    def engine_recovered(self, epoch: int) -> None:
        say("engine_recovered", epoch=epoch)

    def engine_gone(self, epoch: int, reason: str) -> None:
        lives = self._lives(self.peers.pop(epoch, ""))
        say("engine_gone", epoch=epoch, reason=reason, lives=lives)

    def engine_events(self, batches: Sequence[tuple[int, bytes]]) -> None:
        for epoch, records in batches:
            for record in unpack_records(records):
                self.replica[epoch].add(record.block_id)
            say("engine_events", epoch=epoch, blocks=self._held(epoch))

    def rescan(self, epoch: int) -> None:
        self._scan(epoch)
        say("rescan", epoch=epoch, blocks=self._held(epoch))

    def stranger_joined(self, stranger: Stranger) -> None:
        say("stranger_joined", name=stranger.name, differences=stranger.differences)

    def strangers_counted(self, count: int) -> None:
        say("strangers_counted", count=count)

    def count(self, counter: int, amount: int = 1) -> None:
        self.table.counters.add(counter, amount)

    def refused(self, message: Refused) -> None:
        say("refused", reason=message.reason, remedy=message.remedy, retry=message.retry)

    def coordinator_missing(self) -> None:
        say("coordinator_missing")

    def coordinator_lost(self) -> None:
        say("coordinator_lost")

    def beat(self) -> None:
        self.table.beat()
        if not self.hears.is_set():
            self.deaf.set()
            self.hears.wait()

    def _scan(self, epoch: int) -> None:
        table = SlotTable.open(self.peers[epoch], writable=False)
        self.replica[epoch] = {record.block_id for record in unpack_records(table.scan())}
        table.close()

    def _held(self, epoch: int) -> list[int]:
        return sorted(self.replica[epoch])

    @staticmethod
    def _lives(name: str) -> list[int]:
        """Life words of a table that may have been unlinked already."""
        try:
            table = SlotTable.open(name, writable=False)
        except Exception:
            return []
        lives = [table.life(Rank(rank)) for rank in range(table.num_ranks)]
        table.close()
        return lives

    # -- what tests ask for

    def publish(self, blocks: list[int]) -> bytes:
        records = pack_records(
            BlockRecord(block_hash(b, self.options.name), BlockId(b), Generation(0), 0)
            for b in blocks
        )
        return self.table.publish(records, bytes(8 * len(blocks)))

    def lease(self, name: str) -> int:
        """Lease every READY block of a table, for good."""
        table = SlotTable.open(name)
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
                say("leased", blocks=self.lease(order["table"]))
            case "new-epoch":
                old = self.table
                self.ranks = [rank for rank in self.ranks if is_alive(rank)]
                self.begin_epoch()
                old.end_life(None)
                old.retire()
                old.unlink()
                client.rejoin()
            case "be-deaf":
                self.deaf.clear()
                self.hears.clear()
                self.deaf.wait()  # until the client's thread stands still
            case "hear":
                self.hears.set()
            case "fail":
                self.failing.add(order["callback"])
            case "errors":
                say("errors", count=client.errors)
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
    parser.add_argument("--claim-pid", type=int, default=0)
    parser.add_argument("--claim-table", default="")
    options = parser.parse_args()
    engine = Engine(options)
    say("started", ranks=[rank.pid for rank in engine.ranks], table=engine.table.name)
    client = CoordinatorClient(options.run_dir, options.namespace, engine)
    for line in sys.stdin:
        engine.obey(client, json.loads(line))
    client.close()
    engine.table.unlink()
    say("ended")


if __name__ == "__main__":
    main()
