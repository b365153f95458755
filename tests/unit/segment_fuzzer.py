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
from itertools import chain
from pathlib import Path

from kvshm.errors import KvshmError
from tests.unit import fuzz_subjects
from tests.unit.fuzz_subjects import Index, Subject, Table
from tests.unit.served import ServedNode

SUBJECTS: dict[str, type[Subject]] = {"table": Table, "index": Index}
REST_BYTES = 1000
FIELD_BYTES = 192
"""The first bytes of a header hold its numbers; of these every single bit is flipped, too."""
HANG_SECONDS = 20.0
ALLOWED = (KvshmError, IndexError, ValueError)


def flips_of(subject: Subject, dice: random.Random) -> list[tuple[int, int]]:
    """Offset and mask: every byte of the header, and a thousand of the rest."""
    rest = range(subject.header_bytes, len(subject.sound))
    offsets = [*range(subject.header_bytes), *dice.sample(rest, min(REST_BYTES, len(rest)))]
    bits = [(offset, 1 << bit) for offset in range(FIELD_BYTES) for bit in range(8)]
    return bits + [(offset, dice.randrange(1, 256)) for offset in offsets]


def try_all(subject: Subject, node: ServedNode) -> None:
    dumps = [("dump", lambda: fuzz_subjects.dump(node))]
    for name, reader in chain(subject.readers(), dumps):
        subject.write()
        try:
            reader()
        except ALLOWED:
            continue
        except Exception as exc:
            print(f"\n  {name}: {type(exc).__name__}: {exc}", end="")
    subject.forget()


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
    node = ServedNode(options.run_dir, "fuzzed")
    subject = SUBJECTS[options.subject](node)
    part, parts = options.part
    for offset, mask in flips_of(subject, random.Random(options.seed))[part::parts]:
        subject.flip(offset, mask)
        print(f"\n{offset} ^ {mask:#x}", end="", flush=True)
        signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
        try_all(subject, node)
    node.close()
    print("\ndone", flush=True)


if __name__ == "__main__":
    main()
