"""How soon others can read what an engine computed last, when it falls idle with that step.

    PYTHONPATH=examples python benchmarks/bench_idle.py [--rounds 50]

Each request is a single step, which computes whole blocks, and no other request follows it:
nothing makes the engine take a further step.  (Of several steps the last one may complete no block
with speculative decoding: vLLM gives a block its hash when a step is scheduled, from the tokens
known by then, so drafts that it accepts come too late.)

Measured is the time from when the client has its token to when the blocks are READY in the engine's
slot table, and to when another engine's replica names them; both are looked at several times a
millisecond.  Once without and once with speculative decoding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import threading
import time

from local_node import Engine, EngineSpec
from measurement import percentiles, report
from sharing_node import BLOCK_SIZE, SharingNode
from tiny_model import write_model

from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.layout import RECORD_BYTES, unpack_records
from kvshm._shm.slot_table import SlotTableView

BLOCKS = 2
PATTERN = 8
"""A prompt repeats so many tokens, so that the drafter finds something in it."""
VOCABULARY = 1500
WARM_UP = 5
LOOK_SECONDS = 0.0002
"""Between two looks at memory that tells nobody when it changes."""
GIVE_UP_SECONDS = 30.0
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


class Watch(threading.Thread):
    """Looks when an engine shows more blocks than before, and when another one knows of them."""

    def __init__(self, table: SlotTableView, replica: ReplicaReader) -> None:
        super().__init__(daemon=True)
        self._table, self._replica = table, replica
        self._before = self._shown()
        self.shown_at = self.known_at = 0.0

    def _shown(self) -> set[bytes]:
        return {bytes(record.block_hash) for record in unpack_records(self._table.scan())}

    def run(self) -> None:
        """Until all of it has been seen, or for GIVE_UP_SECONDS."""
        until, count = time.perf_counter() + GIVE_UP_SECONDS, len(self._before) + BLOCKS
        while len(self._table.scan()) < count * RECORD_BYTES:
            if time.perf_counter() > until:
                return
            time.sleep(LOOK_SECONDS)
        self.shown_at = time.perf_counter()
        new = self._shown() - self._before
        while not all(self._replica.lookup([block], 0, 1) for block in new):
            if time.perf_counter() > until:
                return
            time.sleep(LOOK_SECONDS)
        self.known_at = time.perf_counter()


def measure(node: SharingNode, a: Engine, b: Engine, rounds: int) -> dict[str, object]:
    """Times in milliseconds; engine ``a`` computes, ``b`` gets to know."""
    shown, known = [], []
    with contextlib.closing(node.table(a)) as table, contextlib.closing(node.replica(b)) as replica:
        for number in range(rounds + WARM_UP):
            drawn = random.Random(number)
            pattern = [drawn.randrange(VOCABULARY) for _ in range(PATTERN)]
            prompt = (pattern * BLOCKS * BLOCK_SIZE)[: BLOCKS * BLOCK_SIZE + 1]
            watch = Watch(table, replica)
            watch.start()
            answer = a.complete(prompt, max_tokens=1)
            watch.join()
            if not watch.known_at:
                raise SystemExit(f"round {number}: not seen in time\n{a.log_tail()}")
            if number >= WARM_UP:
                shown.append((watch.shown_at - answer.last_at) * 1000)
                known.append((watch.known_at - answer.last_at) * 1000)
    return {"ready_ms": percentiles(shown), "in_replica_ms": percentiles(known)}


def main() -> None:
    """Command line: print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    found = {}
    for way, arguments in (
        ("plain", ()),
        ("speculative", ("--speculative-config", json.dumps(DRAFTS))),
    ):
        with SharingNode() as node:
            model = write_model(node.run_dir / "model")
            node.start_coordinator()
            room = (args.rounds + WARM_UP + 2) * (BLOCKS + 1)
            a, b = node.start_engines(
                EngineSpec("a", model, core=0, num_blocks=room, arguments=arguments),
                EngineSpec("b", model, core=1, num_blocks=room, arguments=arguments),
            )
            node.wait_joined(a, b)
            found[way] = measure(node, a, b, args.rounds)
    report("idle", **found)


if __name__ == "__main__":
    main()
