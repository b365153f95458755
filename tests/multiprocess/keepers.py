"""``kvshm keeper`` as a process beside engines without a model.

A block takes a page of its memory, which so is a number of blocks."""

from __future__ import annotations

import os
import subprocess
import sys

from kvshm import Config, Found, LoadState, Reader, Region
from kvshm._base.ids import NO_LEASE_BIT

from .joined import Toy, ended
from .processes import PATIENCE_SECONDS, Managed, Node, wait_until

PAGE = os.sysconf("SC_PAGESIZE")
WIDE = [Region(i * 64, 1 << 13, 1, 1) for i in range(65)]
"""Of one block, whose regions take a cache line each, and more than a page together."""


class Keeper:
    def __init__(self, place: Node, blocks: int = 1000, *options: str) -> None:
        where = ("--run-dir", str(place.run_dir), "--namespace", place.namespace)
        command = ("-P", "-m", "kvshm.tools.cli", "keeper", "--memory", str(blocks * PAGE))
        self.place = place
        self.process: Managed = place.processes.python("keeper", *command, *where, *options)
        self.process.wait_out(lambda line: "bytes for blocks" in line)

    def has(self, keys: list[bytes], group: int = 0) -> list[bool]:
        """For each key: whether this keeper has published its block."""
        there = set()
        with Reader(self._config) as reader:
            for view in reader.engines():
                if view.pid == self.process.pid:
                    there |= {(b.key, b.group) for b in reader.list(view.epoch)}
        return [(key, group) in there for key in keys]

    def metric(self, name: str) -> float:
        """Of all its fingerprints together."""
        command = [sys.executable, "-m", "kvshm.tools.cli", "metrics"]
        where = ("--run-dir", str(self.place.run_dir), "--namespace", self.place.namespace)
        text = subprocess.run([*command, *where], check=True, capture_output=True, text=True).stdout
        own = f'engine="keeper-{self.process.pid}'
        lines = [s for s in text.splitlines() if s.startswith(f"kvshm_{name}{{") and own in s]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    @property
    def _config(self) -> Config:
        return Config(run_dir=str(self.place.run_dir), namespace=self.place.namespace)

    def wait_for(self, keys: list[bytes], group: int = 0) -> None:
        wait_until(lambda: all(self.has(keys, group)), "the keeper has them")


def prompt(toy: Toy, salt: bytes, blocks: int = 6) -> list[bytes]:
    return toy.prompt(blocks, salt)


def is_up_to_date(found: Found) -> bool:
    """Whether the blocks that were found are there still: events of their end may be on their way,
    and then a load is a miss."""
    runs = found._plan.runs if found._plan is not None else ()
    return all(run.peer.table.lease(NO_LEASE_BIT, run.records)[0] == run.num_blocks for run in runs)


def imports(toy: Toy, keys: list[bytes]) -> None:
    """It imports a whole prompt, from a keeper."""

    def offered() -> bool:
        found = toy.node.lookup(keys)
        names = {owner.name.partition("-")[0] for owner in found.owners}
        return names == {"keeper"} and found.length == len(keys) and is_up_to_date(found)

    wait_until(offered, "a keeper offers it")
    load = ended(toy.node.load(toy.node.lookup(keys), range(20, 20 + len(keys))))
    assert load.state is LoadState.DONE
    assert toy.holds(range(20, 20 + len(keys)), keys) == [True] * len(keys)


def kvshm(place: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = ("--run-dir", str(place.run_dir), "--namespace", place.namespace)
    command = [sys.executable, "-P", "-m", "kvshm.tools.cli", *arguments, *where]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
