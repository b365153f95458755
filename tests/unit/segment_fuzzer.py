"""Flips bytes of one segment, one at a time, and lets everything that reads it look.

Run as a program by test_fuzz_segments.py, which sees a crash or a hang as the end of this
process.  On standard output each offset stands before anybody looks; behind it what must not
happen, if it does.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import random
import signal
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

from fuzz_subjects import Index, Subject, Table, dump, watch
from served import ServedNode

from kvshm.errors import KvshmError
from kvshm.tools.node.reader import NodeReader

SUBJECTS: dict[str, type[Subject]] = {"table": Table, "index": Index}
REST_BYTES = 1000
STATISTICS_STEP = 97
"""Of the histograms and the like, which only tools read, one byte in this many is flipped."""
FIELD_BYTES = 192
"""The first bytes of a header hold its numbers; of these every single bit is flipped, too."""
HANG_SECONDS = 20.0
ALLOWED = (KvshmError, IndexError, ValueError)


def flips_of(subject: Subject, dice: random.Random) -> list[tuple[int, int]]:
    """Offset and mask: each byte of the header, some of its statistics, a thousand of the rest."""
    rest = range(max(subject.header_bytes, subject.statistics.stop), len(subject.sound))
    offsets = [*range(subject.header_bytes), *dice.sample(rest, min(REST_BYTES, len(rest)))]
    offsets += subject.statistics[::STATISTICS_STEP]
    bits = [(offset, 1 << bit) for offset in range(FIELD_BYTES) for bit in range(8)]
    return bits + [(offset, dice.randrange(1, 256)) for offset in offsets]


def try_all(subject: Subject, run_dir: Path, watcher: NodeReader) -> None:
    tools = [("dump", lambda: dump(run_dir)), ("watch", lambda: watch(watcher))]
    with NodeReader(run_dir) as begins:
        tools.append(("watch first", lambda: watch(begins)))
        _try_all(subject, tools)
    subject.forget()


def _try_all(subject: Subject, tools: Iterable[tuple[str, Callable[[], object]]]) -> None:
    for name, reader in chain(subject.readers(), tools):
        subject.write()
        try:
            reader()
        except ALLOWED:
            continue
        except Exception as exc:
            print(f"\n  {name}: {type(exc).__name__}: {exc}", end="")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--part", type=int, nargs=2, required=True, help="number, of how many")
    options = parser.parse_args()
    logging.disable()
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)  # says where it hangs, then ends it
    subject = SUBJECTS[options.subject](ServedNode(options.run_dir, "fuzz"))
    watcher = NodeReader(options.run_dir)
    watcher.read()  # maps the sound segment
    part, parts = options.part
    for offset, mask in flips_of(subject, random.Random(options.seed))[part::parts]:
        subject.flip(offset, mask)
        print(f"\n{offset} ^ {mask:#x}", end="", flush=True)
        signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
        try_all(subject, options.run_dir, watcher)
    watcher.close()
    print("\ndone", flush=True)


if __name__ == "__main__":
    main()
