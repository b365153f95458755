"""Two vLLM engines share prefixes on this machine: start them, ask them, show what happened.

    python examples/demo.py [--break]

Exit status 0 only if every request imported tokens, every imported block was verified, and
every answer after an import equals the answer after a local hit in all bits.  ``--break``
makes engine B copy wrong blocks, and must end with status 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from completions import Result
from local_node import Engine, EngineSpec
from sharing_node import Observation, SharingNode, observe
from tiny_model import write_model
from workload import Author, Request, shared_prefixes

HEADINGS = (
    "request", "prompt tokens", "computed ms", "imported ms", "local hit ms",
    "tokens imported", "blocks", "MiB copied", "verified", "equal to local hit",
)  # fmt: skip
UNSHARED = {"kvshm": {"share": False}}
"""Keeps a request to its own engine: no import, so that a local hit is one of the same prefix
that the other engine imported."""


@dataclass(frozen=True)
class Row:
    """One request to engine B, beside the same request answered in two other ways."""

    kind: str
    computed: Result
    """Engine A without any cache."""
    imported: Result
    """Engine B, which imported the shared prefix from A."""
    local_hit: Result
    """Engine A, which has the shared prefix itself."""
    seen: Observation
    """Of engine B during its answer."""

    @property
    def good(self) -> bool:
        """Whether something was imported, all of it verified, and nothing changed by it."""
        verified = self.seen.verified == self.seen.blocks_copied == self.seen.imported_blocks
        sound = verified and self.seen.mismatched == 0 and self.seen.tokens.imported > 0
        return sound and self.imported == self.local_hit

    def cells(self) -> tuple[str, ...]:
        """Return the row's cells below HEADINGS."""
        seen, answers = self.seen, (self.computed, self.imported, self.local_hit)
        return (
            self.kind,
            str(self.imported.prompt_tokens),
            *(f"{answer.ttft_s * 1000:.1f}" for answer in answers),
            str(seen.tokens.imported),
            str(seen.blocks_copied),
            f"{seen.bytes_copied / 2**20:.2f}",
            f"{seen.verified} of {seen.blocks_copied}",
            "yes" if self.imported == self.local_hit else "NO",
        )


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the result table."""
    cells = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join([first.strip().ljust(widths[0]), *rest])


def warm_up(engines: list[Engine]) -> None:
    """Let each engine compute and hit once: the first requests of a process are slow."""
    for seed, engine in enumerate(engines, 1000):
        chat = (Author(seed).message("user", 300),)
        for _ in range(2):
            engine.chat(chat)


def measure(node: SharingNode, a: Engine, b: Engine, request: Request) -> Row:
    """Send one request of the workload in all three ways."""
    with node.sharing(a):
        a.chat(request.before)
    with observe(node, b) as seen:
        imported = b.chat(request.asked)
    local_hit = a.chat(request.asked, kv_transfer_params=UNSHARED)
    # A salt of its own gives a request hashes of its own: nothing cached matches.
    salt = uuid.uuid4().hex
    computed = a.chat(request.asked, kv_transfer_params=UNSHARED, cache_salt=salt)
    return Row(request.kind, computed, imported, local_hit, seen)


def run(node: SharingNode, fault: str) -> list[Row]:
    """Start everything, send the workload, print the table and the index."""
    print("writing a small Llama, starting the coordinator and two engines ...", flush=True)
    model = write_model(node.run_dir / "model")
    node.start_coordinator()
    a, b = node.start_engines(
        EngineSpec("a", model, core=0),
        EngineSpec("b", model, core=1, environment={"KVSHM_FAULT": fault}),
    )
    node.wait_joined(a, b)
    warm_up([a, b])
    rows = [measure(node, a, b, request) for request in shared_prefixes()]
    print(
        "\nEngine A computed each shared prefix; engine B was asked next (time to first token):\n"
    )
    print(*table(rows), sep="\n")
    print(f"\n{node.dump()}", flush=True)
    return rows


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--break", dest="fault", action="store_const", const="wrong-block",
                        default="", help="make engine B copy wrong blocks")  # fmt: skip
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with SharingNode({"KVSHM_VERIFY": "1"}) as node:
        rows = run(node, args.fault)
    good = sum(row.good for row in rows)
    print(f"{good} of {len(rows)} requests imported verified blocks and answered as a local hit")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
