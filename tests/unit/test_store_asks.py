"""The engine's end of asking for a store: a process short of descriptors goes on without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
