"""How a keeper learns which engines there are, without engines."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from kvshm import Config, Reader
from kvshm.tools.keeper.looks import Looks

PATIENCE_SECONDS = 60.0


def test_what_ends_its_thread_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the keeper would go on, and keep nothing of any engine that comes."""

    def fail(_: Reader) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Reader, "engines", fail)
    looks = Looks(Config(run_dir=str(tmp_path)))
    with closing(looks), pytest.raises(MemoryError, match="no room"):
        ask_until_it_ends(looks)


def ask_until_it_ends(looks: Looks) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        assert looks.latest() is None
