"""How much memory can be had: of the machine, and of the container."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm._shm.available_memory import available_bytes, check_available, reserve

MIB = 1 << 20
MACHINE = 100 * MIB + 7 * MIB  # MemAvailable and SwapFree
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")


class Tree:
    def __init__(self, where: Path) -> None:
        self.proc, self.cgroups = where / "proc", where / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        kib = {"MemTotal": 999, "MemAvailable": 100 * 1024, "SwapFree": 7 * 1024}
        lines = [f"{name}:  {n} kB\n" for name, n in kib.items()]
        (self.proc / "meminfo").write_text("".join(lines) + "HugePages_Total: 0\n")

    def belongs(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    def group(
        self, path: str, limit: object, used: int, droppable: int = 0, names: tuple[str, ...] = V2
    ) -> None:
        group = self.cgroups / path
        group.mkdir(parents=True, exist_ok=True)
        (group / names[0]).write_text(f"{limit}\n")
        (group / names[1]).write_text(f"{used}\n")
        active = droppable // 4
        stat = {"inactive_file": droppable - active, "active_file": active, "unevictable": 9}
        lines = [f"{names[2]}{name} {n}\n" for name, n in stat.items()]
        (group / "memory.stat").write_text("".join(lines))

    @property
    def available(self) -> int:
        return available_bytes(self.proc, self.cgroups)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_machine_without_cgroups_has_its_memory_and_its_swap(tree: Tree) -> None:
    assert tree.available == MACHINE


VERSIONS = {
    "1": ("memory", "4:memory:/a/b", V1),
    "1, with another controller": ("memory", "4:cpu,memory:/a/b", V1),
    "2": (".", "0::/a/b", V2),
}


@pytest.mark.parametrize(("mount", "line", "names"), VERSIONS.values(), ids=VERSIONS)
@pytest.mark.parametrize("limited", ["a/b", "a", "."], ids=["own", "parent", "root"])
def test_the_tightest_of_a_group_and_its_parents_counts(
    tree: Tree, mount: str, line: str, names: tuple[str, ...], limited: str
) -> None:
    tree.belongs("9:name=systemd:/a/b", "3:memorable:/a/b", line)
    unlimited = "max" if names is V2 else 9223372036854771712
    for group in ("a/b", "a", "."):
        tree.group(f"{mount}/{group}", unlimited, 50 * MIB, names=names)
    tree.group(f"{mount}/other", MIB, MIB, names=names)
    assert tree.available == MACHINE
    tree.group(f"{mount}/{limited}", 60 * MIB, 50 * MIB, 8 * MIB, names=names)
    assert tree.available == 18 * MIB, "what the kernel can drop is there"


def test_a_container_sees_its_own_group_as_the_mounts_root(tree: Tree) -> None:
    """Without a cgroup namespace the path is that of the machine."""
    for line, mount, names in (("4:memory:/docker/f00", "memory", V1), ("0::/docker/f00", ".", V2)):
        tree.belongs(line)
        tree.group(mount, 30 * MIB, 10 * MIB, names=names)
        assert tree.available == 20 * MIB
        (tree.cgroups / mount / names[0]).unlink()


def test_a_group_outside_of_the_namespace_is_not_looked_for(tree: Tree) -> None:
    tree.belongs("0::/../../escaped")
    tree.group("../../escaped", MIB, 0)
    tree.group(".", 30 * MIB, 0)
    assert tree.available == 30 * MIB


def test_both_versions_at_once_are_both_looked_at(tree: Tree) -> None:
    tree.belongs("4:memory:/one", "0::/two")
    tree.group("memory/one", 30 * MIB, 0, names=V1)
    tree.group("two", 20 * MIB, 0)
    assert tree.available == 20 * MIB


def test_where_more_is_used_than_is_left_nothing_is(tree: Tree) -> None:
    tree.belongs("0::/")
    tree.group(".", 10 * MIB, 11 * MIB)
    assert tree.available == 0


@pytest.mark.parametrize("garbage", ["", "-", "1 2 3", "x" * 5000, "9" * 5000, "\ud800\n"])
@pytest.mark.parametrize("what", [V2[0], V2[1], "memory.stat", "cgroup", "meminfo"])
def test_what_makes_no_sense_or_is_not_there_bounds_nothing(
    tree: Tree, what: str, garbage: str
) -> None:
    tree.belongs("0::/a")
    tree.group("a", 30 * MIB, 0)
    tree.group(".", 40 * MIB, 0)
    tree.group("b", MIB, 0)
    files = {"cgroup": tree.proc / "self/cgroup", "meminfo": tree.proc / "meminfo"}
    file = files.get(what, tree.cgroups / "a" / what)
    expected = {"cgroup": MACHINE, "meminfo": 30 * MIB}.get(what, 40 * MIB)
    file.write_bytes(garbage.encode(errors="surrogatepass"))
    assert tree.available == expected
    file.unlink()
    assert tree.available == expected


def test_where_nothing_can_be_read_nothing_is_refused(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) > 1 << 60


# -- taking it


def test_some_of_it_is_left_to_the_kernel() -> None:
    check_available(63 * MIB, 0, lambda: 64 * MIB)
    with pytest.raises(OSError, match=f" {63 * MIB} are available"):
        check_available(63 * MIB + 1, 0, lambda: 64 * MIB)


def test_memory_that_others_take_meanwhile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, *part: asked.append(part))
    available = iter([64 << 30, 64 << 30, 64])
    with pytest.raises(OSError, match=f" {(2 << 30) + 63} are available"):
        reserve(-1, 4 << 30, lambda: next(available))
    assert asked == [(0, 1 << 30), (1 << 30, 1 << 30)]


# -- a real container's limit

LIMIT = 128 * MIB


@pytest.fixture
def limited() -> Iterator[Path]:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = dict(line.split(":", 2)[1:] for line in lines)
    root = Path("/sys/fs/cgroup")
    if "memory" in own:
        parent, name = root / "memory" / own["memory"].lstrip("/"), V1[0]
    else:  # of other groups than the root only those without processes can have limited ones
        parent, name = root, V2[0]
    group = parent / f"kvshm-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"no memory cgroup can be made (as root it could): {exc}")
    try:
        if not (group / name).exists():
            pytest.skip("the kernel has no memory cgroups here")
        (group / name).write_text(str(LIMIT))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


BEGIN = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
from kvshm.errors import KvshmError
from kvshm._replica.index import Replica
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.own_slot_table import OwnSlotTable, TableSpec
from kvshm.transport.memory import KVMemory
replica = Replica.create("limited", "e", 5, 1 << 10)
spec = TableSpec("limited", "e", 4_000_000, 16, 1, bytes(32))
def fill():
    row = replica.add_row(7, "peer", 3_000_000, 1)
    for first in range(0, 3_000_000, 50_000):
        blocks = range(first, first + 50_000)
        records = [BlockRecord(block.to_bytes(32, "little"), block, 1, 0) for block in blocks]
        refused = replica.apply(row, pack_records(records)).refused
        if refused:
            raise KvshmError(f"{refused} refused, of {replica.capacity} there")
def take_all():
    nbytes = 1 << 40
    while True:
        try:
            return sum(KVMemory.create(nbytes).buffer[::4096])
        except KvshmError as exc:
            nbytes = int(str(exc).split()[-3])
try:
    what
except KvshmError as exc:
    print(type(exc).__name__, exc)
"""
TAKES = {
    "a slot table": ("OwnSlotTable.create(spec, 5)", "SegmentTooSmall kvshm.limited.slots.e."),
    "KV memory": ("KVMemory.create(1 << 28)", "TransportError KV memory of 268435456 bytes: "),
    "an engine of many blocks": ('replica.add_row(7, "p", 1 << 24, 1)', "IndexFull kvshm.limited."),
    "a replica that grows": ("fill()", "KvshmError "),
}


def in_group(procs: Path, what: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", BEGIN.replace("what\n", f"{what}\n"), str(procs)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("what", "sentence"), TAKES.values(), ids=TAKES)
def test_in_a_container_too_small_there_is_a_sentence(
    limited: Path, what: str, sentence: str
) -> None:
    done = in_group(limited, what)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert done.stdout.startswith(sentence)
    assert "are available" in done.stdout + done.stderr


@pytest.mark.multiprocess
def test_what_is_said_to_be_available_can_be_had(limited: Path) -> None:
    done = in_group(limited, "take_all()")
    assert (done.returncode, done.stderr) == (0, "")
