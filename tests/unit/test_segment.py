"""kvshm.segment: creating, opening, owning and recognising shared memory."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvshm import segment as segments
from kvshm.errors import (
    CorruptSegment,
    SegmentError,
    SegmentExists,
    SegmentNotFound,
    SegmentNotReady,
    SegmentTooSmall,
    VersionMismatch,
)
from kvshm.records import (
    LAYOUT_VERSION,
    SEGMENT_BYTES_OFFSET,
    TABLE_MAGIC,
    VERSION_OFFSET,
)
from kvshm.segment import Identity, Segment, SegmentName

NBYTES = 16384
EPOCH = 0xABCDEF0123456789


@pytest.fixture
def segment(namespace: str) -> Iterator[Segment]:
    segment = Segment.create(segments.segment_name(namespace, "slots", "a", EPOCH), NBYTES)
    yield segment
    segment.close()
    segment.unlink()


def write_header(segment: Segment, identity: Identity | None = None) -> None:
    segments.write_header(segment, TABLE_MAGIC, 8192, EPOCH, identity or segments.identity_of())


# -- names


@pytest.mark.parametrize("engine", ["a", 7, "host-1.8001", "0123456789abcdef"])
@pytest.mark.parametrize("revision", [0, 3])
def test_a_name_comes_apart_into_what_it_was_made_of(engine: str | int, revision: int) -> None:
    name = segments.segment_name("prod_1", "index", engine, 255, revision)
    assert segments.parse_segment_name(name) == SegmentName(
        "prod_1", "index", str(engine), 255, revision
    )
    assert str(segments.parse_segment_name(name)) == name


def test_the_name_is_the_documented_one() -> None:
    assert segments.segment_name("ns", "slots", "e", 255) == "kvshm.ns.slots.e.00000000000000ff"


@pytest.mark.parametrize(
    ("namespace", "kind", "engine"),
    [("a.b", "slots", "e"), ("", "slots", "e"), ("n", "slots", "a/b"), ("n", "Slots", "e")],
)
def test_a_name_that_would_be_ambiguous_is_refused(namespace: str, kind: str, engine: str) -> None:
    with pytest.raises(ValueError, match=r"may hold|no usable"):
        segments.segment_name(namespace, kind, engine, 1)


def test_a_name_too_long_for_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match="no usable"):
        segments.segment_name("n" * 230, "slots", "e", 1)


@pytest.mark.parametrize("name", ["psm_1234", "kvshm.n.slots.e", "kvshm.n.slots.e.12", "sem.x"])
def test_foreign_names_are_not_ours(name: str) -> None:
    assert segments.parse_segment_name(name) is None


def test_list_segments_keeps_namespaces_apart(namespace: str, segment: Segment) -> None:
    other = Segment.create(segments.segment_name(namespace + "x", "slots", "a", 1), NBYTES)
    try:
        assert [str(s) for s in segments.list_segments(namespace)] == [segment.name]
        assert {namespace, namespace + "x"} <= {s.namespace for s in segments.list_segments()}
    finally:
        other.close()
        other.unlink()


# -- create and open


def test_a_new_segment_is_zeroed_private_and_has_its_pages(segment: Segment) -> None:
    status = os.stat(f"/dev/shm/{segment.name}")
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == NBYTES
    assert status.st_blocks * 512 >= NBYTES, "pages are reserved, not promised"
    assert bytes(segment.buffer) == bytes(NBYTES)


def test_creating_the_same_name_twice_is_refused_and_harms_nothing(segment: Segment) -> None:
    segment.buffer[100] = 42
    with pytest.raises(SegmentExists, match=segment.name):
        Segment.create(segment.name, NBYTES)
    assert segment.buffer[100] == 42


def test_no_room_names_needed_and_available_bytes_and_leaves_nothing(namespace: str) -> None:
    needed = 1 << 45
    with pytest.raises(SegmentTooSmall, match=rf"needs {needed} bytes.* has \d+ available"):
        Segment.create(segments.segment_name(namespace, "slots", "a", 1), needed)
    assert segments.list_segments(namespace) == []


def test_what_one_mapping_writes_the_other_reads(segment: Segment) -> None:
    reader = Segment.open(segment.name, writable=False)
    writer = Segment.open(segment.name, writable=True)
    writer.buffer[5000] = 7
    assert (segment.buffer[5000], reader.buffer[5000]) == (7, 7)
    reader.close()
    writer.close()


def test_a_read_only_mapping_cannot_be_written(segment: Segment) -> None:
    reader = Segment.open(segment.name, writable=False)
    with pytest.raises(TypeError, match="read-only"):
        reader.buffer[0] = 1
    reader.close()


def test_opening_what_does_not_exist_is_its_own_error(namespace: str) -> None:
    with pytest.raises(SegmentNotFound):
        Segment.open(segments.segment_name(namespace, "slots", "a", 1), writable=False)


def test_a_segment_without_its_size_is_not_ready(namespace: str) -> None:
    name = segments.segment_name(namespace, "slots", "a", 1)
    with open(f"/dev/shm/{name}", "xb"):
        pass
    with pytest.raises(SegmentNotReady):
        Segment.open(name, writable=False)
    segments.unlink(name)


def test_another_users_segment_is_refused_in_clear_words(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_001)
    with pytest.raises(SegmentError, match=r"belongs to uid \d+, this process runs as uid 4000000"):
        Segment.open(segment.name, writable=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.multiprocess
def test_another_user_is_kept_out_by_the_file_mode(segment: Segment) -> None:
    script = (
        "import os, sys\n"
        "from kvshm.segment import Segment\n"
        "from kvshm.errors import SegmentError\n"
        "os.setuid(65534)\n"
        "try:\n    Segment.open(sys.argv[1], writable=False)\n"
        "except SegmentError as exc:\n"
        "    sys.exit(0 if 'another user' in str(exc) else 3)\n"
        "sys.exit(4)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, segment.name], timeout=200, check=False)
    assert done.returncode == 0


# -- close and unlink


def test_close_and_unlink_may_be_called_twice(namespace: str) -> None:
    segment = Segment.create(segments.segment_name(namespace, "slots", "a", 1), NBYTES)
    segment.close()
    segment.close()
    segment.unlink()
    segment.unlink()
    assert segment.closed
    with pytest.raises(SegmentError, match="closed"):
        _ = segment.buffer


def test_a_view_in_use_survives_close(segment: Segment) -> None:
    in_use = segment.buffer[64:128]
    in_use[0] = 9
    segment.close()
    assert in_use[0] == 9, "the mapping stays as long as somebody holds a part of it"
    in_use.release()


def test_an_exported_buffer_survives_close(segment: Segment) -> None:
    exported = memoryview(segment.buffer)
    segment.close()
    assert exported[0] == 0
    exported.release()


def test_a_mapping_survives_unlink(segment: Segment) -> None:
    reader = Segment.open(segment.name, writable=False)
    segment.buffer[10] = 3
    segment.unlink()
    assert reader.buffer[10] == 3
    reader.close()


# -- header


def test_openers_see_not_ready_until_the_version_is_written(segment: Segment) -> None:
    with pytest.raises(SegmentNotReady):
        segments.check_header(segment, TABLE_MAGIC)
    write_header(segment)
    header = segments.check_header(segment, TABLE_MAGIC)
    assert header == (TABLE_MAGIC, 8192, EPOCH, segments.identity_of())


def test_a_header_of_another_version_names_both(segment: Segment) -> None:
    write_header(segment)
    struct.pack_into("<I", segment.buffer, VERSION_OFFSET, LAYOUT_VERSION + 1)
    with pytest.raises(
        VersionMismatch, match=f"layout {LAYOUT_VERSION + 1}, this kvshm reads {LAYOUT_VERSION}"
    ):
        segments.check_header(segment, TABLE_MAGIC)


def test_a_header_of_another_kind_is_corrupt(segment: Segment) -> None:
    write_header(segment)
    with pytest.raises(CorruptSegment, match="KVSHMIDX"):
        segments.check_header(segment, b"KVSHMIDX")
    assert segments.check_header(segment).magic == TABLE_MAGIC


@pytest.mark.parametrize("stated", [0, NBYTES - 1, NBYTES + 1, 2**64 - 1])
def test_a_header_that_misstates_the_size_is_corrupt(segment: Segment, stated: int) -> None:
    write_header(segment)
    struct.pack_into("<Q", segment.buffer, SEGMENT_BYTES_OFFSET, stated)
    with pytest.raises(CorruptSegment, match="states"):
        segments.check_header(segment, TABLE_MAGIC)


# -- identity


def test_this_process_is_alive_and_boot_id_has_16_bytes() -> None:
    identity = segments.identity_of()
    assert len(identity.boot_id) == 16
    assert identity.pid == os.getpid()
    assert segments.is_alive(identity)


@pytest.mark.parametrize("change", ["boot_id", "start_time"])
def test_the_same_pid_of_another_life_is_not_alive(change: str) -> None:
    identity = segments.identity_of()
    other = {"boot_id": bytes(16), "start_time": identity.start_time + 1}[change]
    assert not segments.is_alive(identity._replace(**{change: other}))


def test_a_process_elsewhere_is_neither_known_to_live_nor_to_be_dead() -> None:
    here = segments.identity_of()
    elsewhere = here._replace(boot_id=bytes(16))
    assert not segments.is_alive(elsewhere)
    assert not segments.is_dead(elsewhere)
    assert not segments.is_dead(here)
    assert segments.is_dead(here._replace(start_time=here.start_time + 1))


def test_stat_is_parsed_after_the_last_bracket() -> None:
    fields = " ".join(str(n) for n in range(4, 53))
    assert segments._parse_stat(f"77 (a) Z (b c) S {fields}") == ("S", 22, False)
    ending = fields.replace(" 9 ", " 12 ", 1)  # flags 0x4 and 0x8
    assert segments._parse_stat(f"77 (a) R {ending}") == ("R", 22, True)


@pytest.mark.multiprocess
def test_a_zombie_and_a_reaped_process_are_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = segments.identity_of(child.pid)
    assert segments.is_alive(identity)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not segments.is_alive(identity), "killed, but not reaped yet"
    child.communicate()
    assert not segments.is_alive(identity)
    assert segments.is_dead(identity)
    with pytest.raises(ProcessLookupError):
        segments.identity_of(child.pid)


@pytest.mark.multiprocess
def test_a_leftover_segment_of_a_dead_run_is_recognised(namespace: str) -> None:
    script = (
        "import os, signal, sys\n"
        "from kvshm.segment import *\n"
        "segment = Segment.create(sys.argv[1], 16384)\n"
        "write_header(segment, b'KVSHMSLT', 8192, 5, identity_of())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    name = segments.segment_name(namespace, "slots", "a", 5)
    done = subprocess.run([sys.executable, "-c", script, name], timeout=200, check=False)
    assert done.returncode == -9
    assert [str(s) for s in segments.list_segments(namespace)] == [name]
    assert segments.is_dead(segments.owner_of(name))
    segments.unlink(name)
