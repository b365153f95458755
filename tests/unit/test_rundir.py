"""The run directory is only used when it is this user's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvshm._base.rundir import (
    MAX_FOUND,
    SOCKET_PATH_BYTES,
    choose_run_directory,
    command_endpoint,
    engine_socket,
    event_endpoint,
    list_peers_files,
    list_sockets,
    lock_path,
    open_run_directory,
    peers_file,
    rank_socket,
    require_room,
)
from kvshm.errors import RunDirectoryError


def test_created_with_mode_0700_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = open_run_directory(str(tmp_path / "run"), {})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert open_run_directory(str(path), {}) == path


def test_where_it_is() -> None:
    runtime = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert choose_run_directory("/given", runtime) == Path("/given")
    assert choose_run_directory("", runtime) == Path("/run/user/7/kvshm")
    own = Path(f"/tmp/kvshm-{os.geteuid()}")
    assert choose_run_directory("", {}) == own
    assert choose_run_directory("", {"XDG_RUNTIME_DIR": "relative"}) == own


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707, 0o1700, 0o500])
def test_other_modes_are_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(RunDirectoryError, match=f"chmod 700 {tmp_path}"):
        open_run_directory(str(tmp_path), {})
    tmp_path.chmod(0o700)


def test_an_inherited_set_group_id_bit_is_harmless(tmp_path: Path) -> None:
    tmp_path.chmod(0o2777)
    run_dir = open_run_directory(str(tmp_path / "run"), {})
    assert stat.S_IMODE(run_dir.stat().st_mode) in (0o700, 0o2700)
    run_dir.chmod(0o2700)
    assert open_run_directory(str(run_dir), {}) == run_dir


def test_links_files_and_relative_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=f"{tmp_path}/link is a link; set KVSHM_RUN_DIR"):
        open_run_directory(str(tmp_path / "link"), {})
    with pytest.raises(RunDirectoryError, match="File exists"):
        open_run_directory(str(tmp_path / "file"), {})
    with pytest.raises(RunDirectoryError, match="relative"):
        open_run_directory("run", {})
    with pytest.raises(RunDirectoryError, match="No such file"):
        open_run_directory(str(tmp_path / "no" / "such"), {})


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    said = f"belongs to uid {owner}, this process runs as uid {owner + 1}; "
    said += "run engines, coordinator and commands as one user, or set KVSHM_RUN_DIR to a "
    with pytest.raises(RunDirectoryError, match=f"{said}directory of your own"):
        open_run_directory(str(tmp_path), {})


def test_names_of_one_namespace_are_its_own() -> None:
    run_dir = Path("/r")
    names = {
        f(run_dir, namespace)
        for f in (command_endpoint, event_endpoint, lambda r, n: str(lock_path(r, n)))
        for namespace in ("a", "b")
    }
    assert len(names) == 6
    assert command_endpoint(run_dir, "a") == "ipc:///r/a.commands"


def test_a_socket_path_that_is_too_long_is_refused_with_the_remedy() -> None:
    longest = Path("/" + "d" * (SOCKET_PATH_BYTES - len("/n.commands") - 1))
    assert len(command_endpoint(longest, "n")) == len("ipc://") + SOCKET_PATH_BYTES
    with pytest.raises(RunDirectoryError, match=r"108 bytes.*KVSHM_RUN_DIR"):
        command_endpoint(Path(f"{longest}d"), "n")
    umlauts = Path("/" + "ä" * 50)
    with pytest.raises(RunDirectoryError, match="KVSHM_RUN_DIR"):
        command_endpoint(umlauts, "n")


def test_room_is_asked_for_the_longest_socket_of_an_engine() -> None:
    room = SOCKET_PATH_BYTES - len("/n.engine.0123456789abcdef.sock")
    longest = Path("/".ljust(room, "d"))
    require_room(longest, "n")
    assert len(str(engine_socket(longest, "n", 2**64 - 1))) == SOCKET_PATH_BYTES
    assert len(str(rank_socket(longest, "n", "01234567", 63))) < SOCKET_PATH_BYTES
    with pytest.raises(RunDirectoryError, match=r"108 bytes.*KVSHM_RUN_DIR"):
        require_room(Path(f"{longest}d"), "n")


def test_sockets_are_found_by_namespace(tmp_path: Path) -> None:
    for namespace in ("n", "m"):
        for epoch in (1, 2**64 - 1):
            engine_socket(tmp_path, namespace, epoch).touch()
        rank_socket(tmp_path, namespace, "0a1b", 12).touch()
    strangers = ("n.lock", "n.commands", "n.tables.sock", "n.engine.1.sock", "n.rank.a-b.0.sock")
    for stranger in (*strangers, "n.engine.000000000000000X.sock", "n.rank.ab.0.sock.new"):
        (tmp_path / stranger).touch()
    found = [(socket.namespace, socket.epoch) for socket in list_sockets(tmp_path, "n")]
    assert found == [("n", 1), ("n", 2**64 - 1), ("n", None)]
    assert len(list_sockets(tmp_path, None)) == 6


def test_a_listing_is_bounded(tmp_path: Path) -> None:
    for epoch in range(MAX_FOUND + 5):
        peers_file(tmp_path, "n", epoch).touch()
    assert len(list_peers_files(tmp_path, "n")) == MAX_FOUND
