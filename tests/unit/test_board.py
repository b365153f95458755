"""The board on which ranks of several engines show digests: what readers see, what is left."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvshm._base.rundir import board_file
from kvshm._node.board import _ENTRY, DIGEST_BYTES, RankBoard
from kvshm._node.leftovers import clear, left_by_engines
from kvshm.errors import TransportError

ONE, OTHER = bytes([1]) * DIGEST_BYTES, bytes([2]) * DIGEST_BYTES


def board_of(folder: Path) -> RankBoard:
    return RankBoard.named(folder, "n", "ab", 3)


@pytest.fixture
def board(tmp_path: Path) -> Iterator[RankBoard]:
    with closing(board_of(tmp_path)) as made:
        yield made


def test_whoever_maps_it_sees_what_each_rank_shows(board: RankBoard, tmp_path: Path) -> None:
    with closing(board_of(tmp_path)) as other:
        assert other.digests(other.look()) == [None] * 3
        board.show(2, ONE)
        other.show(0, OTHER)
        for each in (board, other):
            assert each.digests(each.look()) == [OTHER, None, ONE]


def test_another_process_sees_it(board: RankBoard) -> None:
    board.show(1, ONE)
    code = (
        "import sys; from pathlib import Path; from kvshm._node.board import RankBoard\n"
        "b = RankBoard(Path(sys.argv[1]), 3); print(b.digests(b.look())[1].hex()); b.clear(1)"
    )
    call = [sys.executable, "-c", code, str(board.path)]
    assert subprocess.check_output(call, text=True).strip() == ONE.hex()
    assert board.digests(board.look())[1] is None


def test_the_same_digest_again_changes_nothing(board: RankBoard) -> None:
    board.show(0, ONE)
    before = board.look()
    board.show(0, ONE)
    assert board.look() == before
    assert board.times_cleared() == [0, 0, 0]


@pytest.mark.parametrize(
    "changes", [[None], [None, ONE], [OTHER], [OTHER, ONE], [OTHER, None, ONE]]
)
def test_every_change_shows_also_one_that_was_undone(
    board: RankBoard, changes: list[bytes | None]
) -> None:
    board.show(1, ONE)
    before, times = board.look(), board.times_cleared()
    for change in changes:
        board.clear(1) if change is None else board.show(1, change)
    assert board.look() != before
    assert board.times_cleared() != times
    assert board.digests(board.look())[1] == changes[-1]


def test_a_rank_that_shows_nothing_can_hide_nothing(board: RankBoard) -> None:
    before = board.look()
    board.clear(1)
    assert board.look() == before


def test_a_write_half_done_is_no_digest(board: RankBoard) -> None:
    board.show(0, ONE)
    before = board.look()
    board.show(0, OTHER)
    after = board.look()
    for done in range(1, _ENTRY.size):
        half = after[:done] + before[done:]
        assert half == after or board.digests(half)[0] in (ONE, None)


def test_without_room_there_is_no_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file would end whoever looks at it (SIGBUS)."""

    def full(fd: int, nbytes: int) -> None:
        assert nbytes == os.fstat(fd).st_size
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvshm._node.board.reserve", full)
    with pytest.raises(TransportError, match="No space left"):
        board_of(tmp_path)


def test_what_cannot_be_mapped_is_said(tmp_path: Path) -> None:
    board_file(tmp_path, "n", "ab").symlink_to("/dev/null")
    with pytest.raises(TransportError, match=r"n\.board\.ab cannot be mapped: "):
        board_of(tmp_path)


def test_a_board_is_left_when_the_last_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = [board_of(tmp_path), board_of(tmp_path)]
    path = boards[0].path
    os.utime(path, (0, 0))
    for board in boards:
        assert left_by_engines(tmp_path, "n") == []
        board.close()
        board.close()
    assert left_by_engines(tmp_path, "other") == []
    assert clear(tmp_path, "n").removed == [str(path)]
    assert not path.exists()


def test_a_board_that_was_just_made_may_not_be_locked_yet(tmp_path: Path) -> None:
    board_file(tmp_path, "n", "ab").touch()
    assert left_by_engines(tmp_path, "n") == []


def test_a_board_that_is_removed_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed_first(fd: int, how: int) -> None:
        monkeypatch.undo()
        board_file(tmp_path, "n", "ab").unlink()

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with closing(board_of(tmp_path)) as board:
        assert board.path.exists()
        board.show(0, ONE)
        with closing(board_of(tmp_path)) as other:
            assert other.digests(other.look())[0] == ONE


HANGS = """
import fcntl, os, signal, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
"""Is stopped while it looks whether a board is left."""


def test_a_process_that_hangs_as_it_cleans_up_stops_no_rank(tmp_path: Path) -> None:
    path = board_file(tmp_path, "n", "ab")
    path.touch()
    command = [sys.executable, "-c", HANGS, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as cleaner:
        try:
            assert cleaner.stdout is not None
            assert cleaner.stdout.readline() == "\n"
            with pytest.raises(TransportError, match=r"cannot be mapped: a process that cleans up"):
                board_of(tmp_path)
        finally:
            cleaner.kill()
    with closing(board_of(tmp_path)) as board:
        assert board.digests(board.look())[0] is None


def test_a_forked_child_keeps_no_board(board: RankBoard) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if board._memory.closed else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert not board._memory.closed
