"""What the coordinator looks at before it lets an engine in."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from kvshm.coordinator.reaper import Reaper

from kvshm.interfaces import MemoryDescriptor
from kvshm.protocol import EngineInfo, RankInfo
from kvshm.records import LAYOUT_VERSION, VERSION_OFFSET
from kvshm.segment import SHM_DIRECTORY, identity_of
from kvshm.slots import SlotTable, TableSpec
from kvshm.terms import Epoch, Fingerprint
from kvshm.version import __version__


@pytest.fixture
def table(namespace: str) -> Iterator[SlotTable]:
    spec = TableSpec(namespace, "e", 8, 16, 1, Fingerprint(bytes(32)))
    table = SlotTable.create(spec, Epoch(secrets.randbits(63) + 1), identity_of())
    yield table
    table.close()
    table.unlink()


@pytest.fixture
def info(table: SlotTable) -> EngineInfo:
    """The truth about an engine of this process."""
    identity = identity_of()
    memory = MemoryDescriptor("none", table.epoch, 0, [], {})
    return EngineInfo(
        epoch=table.epoch,
        name="e",
        pid=identity.pid,
        start_time=identity.start_time,
        fingerprint=bytes(32),
        fields={},
        table=table.name,
        num_blocks=8,
        ranks=[RankInfo(identity.pid, identity.start_time, memory)],
        kvshm_version="9.8",
    )


def test_an_engine_that_is_what_it_says_is_let_in(
    namespace: str, info: EngineInfo, tmp_path: Path
) -> None:
    assert Reaper(tmp_path, namespace).examine(info) is None


def test_another_layout_is_refused_and_who_must_upgrade_is_named(
    namespace: str, info: EngineInfo, tmp_path: Path
) -> None:
    layout = LAYOUT_VERSION + 1
    with (SHM_DIRECTORY / info.table).open("r+b") as segment:
        segment.seek(VERSION_OFFSET)
        segment.write(struct.pack("<I", layout))
    refusal = Reaper(tmp_path, namespace).examine(info)
    assert refusal is not None
    assert f"the engine has layout {layout} (kvshm 9.8)" in refusal.reason
    assert f"the coordinator layout {LAYOUT_VERSION} (kvshm {__version__})" in refusal.reason
    assert "upgrade kvshm in the coordinator's environment to 9.8" in refusal.remedy


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epoch": 1}, "is another's"),
        ({"num_blocks": 9}, "has 8 blocks and 1 ranks"),
        ({"start_time": 1}, "does not run here"),
        ({"table": "kvshm.nowhere.slots.e.0000000000000001"}, "is not in the coordinator's"),
    ],
)
def test_what_does_not_fit_is_refused(
    namespace: str, info: EngineInfo, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    refusal = Reaper(tmp_path, namespace).examine(msgspec.structs.replace(info, **change))
    assert refusal is not None
    assert reason in refusal.reason
