"""kvshm._node.leftovers: what clearing up removes and leaves to the living, and odd entries."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshm._base.rundir import (
    MAX_FOUND,
    command_endpoint,
    engine_socket,
    event_endpoint,
    list_sockets,
    lock_path,
    peers_file,
    rank_socket,
    tables_socket,
)
from kvshm._node.leftovers import clear, left_by_engines
from kvshm._node.locks import release_lock, take_lock
from kvshm._shm.fds import is_served
from kvshm.errors import RunDirectoryError

from .served import ServedNode


def entries(node: ServedNode) -> set[str]:
    return set(os.listdir(node.run_dir))


def left_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))


def test_sockets_and_lists_of_the_dead_go_those_of_the_living_stay(served: ServedNode) -> None:
    living, dead = served.serve("living", 1), served.serve("dead", 2)
    lists = [peers_file(served.run_dir, served.namespace, epoch) for epoch in (1, 2)]
    for path in (*lists, lists[1].with_name(f"{lists[1].name}.new")):
        path.write_bytes(b"")
    left_socket(rank_socket(served.run_dir, served.namespace, "abc", 0))
    dead.crash()
    gone = {path.name for path in left_by_engines(served.run_dir, served.namespace)}
    assert len(gone) == 4
    kept = {living.path.name, lists[0].name}
    assert entries(served) == gone | kept
    found = clear(served.run_dir, served.namespace)
    assert {Path(path).name for path in found.removed} == gone
    assert (entries(served), found.left, found.coordinator) == (kept, [], "")


def test_what_a_coordinator_left_goes_too_and_of_other_namespaces_nothing(
    served: ServedNode,
) -> None:
    run_dir = served.run_dir
    for namespace in (served.namespace, "other"):
        ends = (command_endpoint(run_dir, namespace), event_endpoint(run_dir, namespace))
        for path in (*ends, os.fspath(tables_socket(run_dir, namespace))):
            left_socket(Path(path.removeprefix("ipc://")))
    other = ServedNode(run_dir, "other")
    living = other.serve("living", 1)  # an epoch in the other namespace alone
    peers_file(run_dir, "other", 1).touch()
    left_socket(rank_socket(run_dir, "other", "abc", 0))
    kept = {name for name in entries(served) if name.startswith("other.")}
    assert len(kept) == 6
    assert len(clear(run_dir, served.namespace, dry_run=True).removed) == 3
    assert len(clear(run_dir, served.namespace).removed) == 3
    assert entries(served) == kept
    assert is_served(living.path)
    other.close()


MAKE: dict[str, Callable[[Path], object]] = {
    "a file": Path.touch,
    "a FIFO": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a directory": Path.mkdir,
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_what_is_no_socket_is_served_by_no_one_and_never_waited_for(
    served: ServedNode, make: Callable[[Path], object]
) -> None:
    paths = [
        engine_socket(served.run_dir, served.namespace, 7),
        peers_file(served.run_dir, served.namespace, 8),
        tables_socket(served.run_dir, served.namespace),
    ]
    for path in paths:
        make(path)
    found = clear(served.run_dir, served.namespace)
    if make is Path.mkdir:
        assert sorted(found.left) == sorted(f"{path}: Is a directory" for path in paths)
    else:
        assert (entries(served), found.left) == (set(), [])


def test_foreign_names_are_left_alone_and_a_scan_is_bounded(served: ServedNode) -> None:
    foreign = ["x", f"{served.namespace}.engine.7.sock", f"{served.namespace}.log", "..sock"]
    for name in foreign:
        (served.run_dir / name).touch()
    for epoch in range(MAX_FOUND + 10):
        engine_socket(served.run_dir, served.namespace, epoch).touch()
    assert len(list_sockets(served.run_dir, None)) == MAX_FOUND
    for _ in range(2):  # what one clearing does not come to, the next one does
        clear(served.run_dir, served.namespace)
    assert entries(served) == set(foreign)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, MAKE["a link to nothing"]])
def test_an_odd_lock_is_refused_in_a_sentence(
    served: ServedNode, make: Callable[[Path], object]
) -> None:
    path = lock_path(served.run_dir, served.namespace)
    make(path)
    with pytest.raises(RunDirectoryError, match=f"lock file {path} "):
        take_lock(path)
    with pytest.raises(RunDirectoryError):
        clear(served.run_dir, served.namespace)


def test_a_socket_is_served_until_its_server_ends(served: ServedNode) -> None:
    engine = served.serve("e", 1)
    assert is_served(engine.path)
    engine.crash()
    assert engine.path.is_socket()
    assert not is_served(engine.path)


def test_a_released_lock_is_free_also_while_a_forked_child_has_its_descriptor(
    served: ServedNode,
) -> None:
    path = lock_path(served.run_dir, "another")
    fd = take_lock(path)
    of_child = os.dup(fd)  # the same open file, as after a fork
    release_lock(fd)
    os.close(take_lock(path))
    os.close(of_child)
