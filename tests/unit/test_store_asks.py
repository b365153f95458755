"""The engine's end of asking for a store."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from kvshm import Group
from kvshm._engine.store_asks import Coming, Lacking, StoreAsks, Wanted
from kvshm.tools.keeper.desk import Desk

KIND = b"k" * 32
ASKS = """
import os, resource, sys
from pathlib import Path
from kvshm._engine.store_asks import AGAIN_SECONDS, StoreAsks

now = [0.0]
asks = StoreAsks(Path(sys.argv[1]), "n", lambda: now[0])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
free = os.open("/dev/null", os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 3, hard))
print(asks.possible)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
print(asks.possible)
now[0] = AGAIN_SECONDS
print(asks.possible)
asks.close()
"""


def test_without_descriptors_nothing_is_asked_and_the_process_goes_on(tmp_path: Path) -> None:
    (tmp_path / "n.store.sock").touch()
    command = [sys.executable, "-c", ASKS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split()) == (0, ["False", "False", "True"]), ended.stderr


def test_what_was_withdrawn_is_told_until_a_keeper_confirms_it(tmp_path: Path) -> None:
    with (
        closing(Desk(tmp_path, "n")) as desk,
        closing(StoreAsks(tmp_path, "n", time.monotonic)) as asks,
    ):

        def told(confirmed: int = 0, kind: bytes = KIND) -> int:
            """What an ask says of it; a keeper then answers."""
            assert asks.possible
            number = asks.ask(kind, [b"k"], Lacking(0, 0, 1), (Group(0, 16),), 1.0)
            assert number is not None
            route, wanted = next_ask(desk)
            desk.answer(route, Coming(number, 0, 0.0, confirmed))
            deadline = time.monotonic() + 60
            while asks.answer(number) is None:
                assert time.monotonic() < deadline
            return wanted.withdrew

        assert told() == 0
        asks.withdrew = KIND, 5
        assert told() == 5
        assert told(kind=bytes(32)) == 0  # with other weights it has withdrawn nothing
        assert told(confirmed=5) == 5
        assert told() == 0
        asks.withdrew = KIND, 6
        assert told(confirmed=5) == 6
        assert told() == 6


def next_ask(desk: Desk) -> tuple[bytes, Wanted]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for found in desk.asks():
            return found
    raise AssertionError("nothing was asked")
