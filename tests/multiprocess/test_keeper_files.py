"""What a keeper keeps outlives it in files, but for what engines have withdrawn."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshm import LoadState, Reader
from kvshm.tools.keeper import keeper as engine_keeper
from kvshm.tools.keeper.shelf import Filled
from kvshm.tools.kv import kept_files
from kvshm.tools.kv.block_file import BlockFile, BlockFileError
from kvshm.tools.kv.kept_files import SUFFIX

from .joined import Toy, Toys, ended, served
from .keepers import PAGE, Keeper, imports, kvshm, prompt
from .processes import PATIENCE_SECONDS, Node, wait_until

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def place() -> Iterator[Node]:
    """A node of its own: a keeper keeps blocks of all engines there."""
    with served() as node:
        yield node


def kept_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def test_what_it_had_is_there_after_a_reboot(place: Node, toys: Toys, tmp_path: Path) -> None:
    """Also beside a file that is damaged, and once an engine withdraws it is gone as any other."""
    keeper = Keeper(place, 1000, "--files", str(tmp_path))
    a, b = toys.pair()
    other = toys.join("c", kind="of another kind")
    keys, more = prompt(a, b"1", 8), prompt(other, b"2")
    a.compute(keys, range(8))
    other.compute(more, range(6))
    keeper.wait_for(keys)
    keeper.wait_for(more)
    assert keeper.process.terminate() == 0
    assert "wrote 14 blocks into 2 files" in str(keeper.process.out)
    for toy in (a, b, other):
        toy.node.close()
    assert [path.stat().st_mode & 0o777 for path in kept_in(tmp_path)] == [0o600] * 2
    (tmp_path / f"damaged{SUFFIX}").write_bytes(b"no file of blocks")
    again = Keeper(place, 1000, "--files", str(tmp_path))
    again.process.wait_out(lambda line: f"damaged{SUFFIX} is no file of kvshm" in line)
    assert "read 14 blocks from files" in str(again.process.out)
    imports(toys.join("d", kind="of another kind"), more)
    d = toys.join("e")
    imports(d, keys)
    d.node.reset()
    wait_until(lambda: not any(again.has(keys)), "it has dropped them")
    assert all(again.has(more))
    assert again.process.terminate() == 0
    assert "wrote 6 blocks into 1 files" in str(again.process.out)
    assert len(kept_in(tmp_path)) == 1


def with_file(place: Node, folder: Path, toy: Toy) -> list[bytes]:
    """A keeper has written what this engine has."""
    keeper, keys = Keeper(place, 1000, "--files", str(folder)), prompt(toy, b"1")
    toy.compute(keys, range(6))
    keeper.wait_for(keys)
    assert keeper.process.terminate() == 0
    assert len(kept_in(folder)) == 1
    return keys


def test_what_was_withdrawn_does_not_come_back_when_it_is_killed(
    place: Node, toys: Toys, tmp_path: Path
) -> None:
    a = toys.join("a")
    wrong = with_file(place, tmp_path, a)
    keeper = Keeper(place, 1000, "--files", str(tmp_path))
    keeper.wait_for(wrong)
    assert kept_in(tmp_path) == []
    a.node.reset()
    wait_until(lambda: not any(keeper.has(wrong)), "it has dropped them")
    keeper.process.kill()
    again = Keeper(place, 1000, "--files", str(tmp_path))
    assert "read 0 blocks from files" in str(again.process.out)
    assert not a.node.lookup(wrong)


def test_what_is_withdrawn_right_before_its_end_is_not_written(
    place: Node, toys: Toys, tmp_path: Path
) -> None:
    a = toys.join("a")
    keeper, wrong = Keeper(place, 1000, "--files", str(tmp_path)), prompt(a, b"1")
    a.compute(wrong, range(6))
    keeper.wait_for(wrong)
    keeper.process.signal(signal.SIGSTOP)
    wait_until(lambda: keeper.process.is_stopped, "it is stopped")
    a.node.reset()
    keeper.process.signal(signal.SIGTERM)
    keeper.process.signal(signal.SIGCONT)
    assert keeper.process.wait() == 0
    assert "wrote 0 blocks into 0 files" in str(keeper.process.out)
    assert kept_in(tmp_path) == []


def test_what_is_withdrawn_while_it_writes_is_in_no_file(
    place: Node, toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: the engine is reset when the first of two files was written."""
    a, b = toys.pair()
    wrong, right = prompt(a, b"1"), prompt(b, b"2")
    a.compute(wrong, range(6))
    b.compute(right, range(6))
    said = list[str]()
    keeper = engine_keeper.Keeper(
        a.config, engine_keeper.Limits(1 << 20, 1 << 30, 60), "k", time.monotonic(), said.append
    )
    with closing(keeper):

        def kept() -> int:
            keeper.go_round(time.monotonic())
            return sum(map(len, keeper._shelves.values()))

        wait_until(lambda: kept() == 12, "all are kept")
        monkeypatch.setattr(kept_files, "FILE_BYTES", 6 * PAGE)
        files, write, parts = kept_files.Files(tmp_path, "k", said.append), kept_files._write, []

        def then_reset(path: Path, part: Filled, memory: memoryview) -> None:
            write(path, part, memory)
            parts.append(part)
            if len(parts) == 1:
                a.node.reset()
            assert kept_in(tmp_path) == [], "one that is killed now leaves none"

        monkeypatch.setattr(kept_files, "_write", then_reset)
        assert keeper.write(files)
    assert said[-1] == "wrote 6 blocks into 1 files"
    (path,) = kept_in(tmp_path)
    assert {block.key for block in BlockFile(path).what.blocks} == set(right)


def test_a_folder_belongs_to_one_keeper(place: Node, tmp_path: Path) -> None:
    first = Keeper(place, 1000, "--files", str(tmp_path), "--name", "cellar")
    refused = kvshm(place, "keeper", "--memory", "1M", "--files", str(tmp_path))
    assert refused.returncode == 2
    assert f"cellar (pid {first.process.pid}) has this folder" in refused.stderr
    first.process.kill()
    Keeper(place, 1000, "--files", str(tmp_path))


def test_what_lies_in_the_folder_besides_changes_nothing(
    place: Node, toys: Toys, tmp_path: Path
) -> None:
    (tmp_path / f"folder{SUFFIX}").mkdir()
    os.mkfifo(tmp_path / f"fifo{SUFFIX}")
    a = toys.join("a")
    keeper, keys = Keeper(place, 1000, "--files", str(tmp_path)), prompt(a, b"1")
    a.compute(keys, range(6))
    keeper.wait_for(keys)
    (tmp_path / f"{a.table.fingerprint.hex()[:32]}.00000{SUFFIX}").mkdir()
    assert keeper.process.terminate() == 0
    assert "wrote 6 blocks into 1 files" in str(keeper.process.out)
    again = Keeper(place, 1000, "--files", str(tmp_path))
    assert "read 6 blocks from files" in str(again.process.out)


def test_its_exit_status_says_that_it_could_not_write(
    place: Node, toys: Toys, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    a = toys.join("a")
    keeper, keys = Keeper(place, 1000, "--files", str(folder)), prompt(a, b"1")
    a.compute(keys, range(6))
    keeper.wait_for(keys)
    shutil.rmtree(folder)
    assert keeper.process.terminate() == 1
    assert "not written: " in str(keeper.process.out)
    assert "wrote 0 blocks into 0 files" in str(keeper.process.out)


def written(place: Node, toys: Toys, folder: Path) -> tuple[list[bytes], Path]:
    """A prompt of an engine that has ended, and the file in which a keeper has left it."""
    keeper, a = Keeper(place, 1000, "--files", str(folder)), toys.join("a")
    keys = prompt(a, b"1")
    a.compute(keys, range(6))
    keeper.wait_for(keys)
    assert keeper.process.terminate() == 0
    a.node.close()
    (path,) = kept_in(folder)
    return keys, path


def test_a_block_whose_bytes_have_changed_in_a_file_is_left_out(
    place: Node, toys: Toys, tmp_path: Path
) -> None:
    keys, path = written(place, toys, tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    again = Keeper(place, 1000, "--files", str(tmp_path))
    again.process.wait_out(lambda line: line == "read 5 blocks from files")
    wait_until(lambda: sum(again.has(keys)) == 5, "it shows them")
    imports(toys.join("b"), [key for key in keys if all(again.has([key]))])


def test_a_block_that_cannot_be_read_costs_no_other_one(
    place: Node, toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: there is no memory for the third block when it is read."""
    keys, _ = written(place, toys, tmp_path)
    rows, said = BlockFile.rows, list[str]()

    def lacks_memory(file: BlockFile, name: str, start: int, end: int) -> Any:
        if start == 2:
            raise BlockFileError("not enough memory")
        return rows(file, name, start, end)

    monkeypatch.setattr(BlockFile, "rows", lacks_memory)
    config = toys.join("b").config
    keeper = engine_keeper.Keeper(
        config, engine_keeper.Limits(1 << 20, 1 << 30, 60), "k", time.monotonic(), said.append
    )

    def shown() -> set[bytes]:
        keeper.go_round(time.monotonic())
        with Reader(config) as reader:
            views = [view for view in reader.engines() if view.keeps]
            return {block.key for view in views for block in reader.list(view.epoch)}

    with closing(keeper):
        keeper.read(kept_files.Files(tmp_path, "k", said.append))
        assert said[-1] == "read 5 blocks from files"
        wait_until(lambda: shown() == {*keys} - {keys[2]}, "it shows the others")


def test_other_tools_read_its_files(place: Node, toys: Toys, tmp_path: Path) -> None:
    keys, path = written(place, toys, tmp_path)
    where = ("--run-dir", str(place.run_dir), "--namespace", place.namespace)
    command = ("-P", "-m", "kvshm.tools.cli", "kv", "serve", str(path), *where)
    server = place.processes.python("serve", *command)
    b = toys.join("b")
    found = b.node.wait_for(keys, PATIENCE_SECONDS)
    assert ended(b.node.load(found, range(6))).state is LoadState.DONE
    assert b.holds(range(6), keys) == [True] * 6
    assert server.terminate() == 0


def test_what_has_no_room_at_its_start_is_said(place: Node, toys: Toys, tmp_path: Path) -> None:
    with_file(place, tmp_path, toys.join("a"))
    again = Keeper(place, 4, "--files", str(tmp_path))
    again.process.wait_out(
        lambda line: line == "read 4 blocks from files; 2 others had no room, and are gone"
    )
