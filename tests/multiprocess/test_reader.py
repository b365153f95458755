"""``kvshm.Reader`` beside engines that die, and beside files that are no engine's."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvshm import Config, MisuseError, Reader
from kvshm._api import reader as reader_module
from kvshm._base.rundir import engine_socket
from kvshm._shm.descriptors import Reply

from .joined import TOKENS, Toys
from .processes import Node, fresh_node, wait_until
from .surface_contents import keys_of
from .surface_world import Peer

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def reader(place: Node) -> Iterator[Reader]:
    config = Config(run_dir=str(place.run_dir), namespace=place.namespace)
    with Reader(config) as reader:
        yield reader


@pytest.fixture
def alone() -> Iterator[tuple[Peer, Config]]:
    """An engine in a process of its own, with six published blocks, and how to read them.  It has
    no coordinator, which would remove its files."""
    with fresh_node() as place:
        peer = Peer(place, "peer")
        peer.join("reader")
        peer.do("publish", prompt=0, start=0, number=6)
        config = Config(run_dir=str(place.run_dir), namespace=place.namespace)
        with Reader(config) as reader:
            wait_until(lambda: len(list(reader.list())) == 6, "its blocks are there")
        yield peer, config


def test_engines_and_their_blocks_are_seen(toys: Toys, reader: Reader) -> None:
    assert reader.engines() == ()
    a, b = toys.join("a"), toys.join("b", kind="other weights")
    keys = a.node.keys(range(3 * TOKENS))
    a.compute(keys, [5, 6, 7])
    b.compute(keys[:1], [9])
    one, other = reader.engines()
    assert (one.name, one.epoch, one.pid, one.model) == ("a", a.table.epoch, os.getpid(), "m")
    assert (one.num_blocks, one.block_size, one.num_ranks, one.alive) == (32, TOKENS, 1, True)
    assert one.fingerprint != other.fingerprint
    first, second, third = reader.holders(keys)
    assert {(h.engine, h.block_id, h.depth, h.group) for h in first} == {
        ("a", 5, 0, 0),
        ("b", 9, 0, 0),
    }
    assert [h.block_id for h in (*second, *third)] == [6, 7]
    assert reader.holders([bytes(32)]) == ((),)
    assert reader.holders(keys, group=1) == ((), (), ())
    assert {block.key for block in reader.list(a.table.epoch)} == {*keys}
    assert list(reader.list(epoch=1)) == []
    a.node.retract([6])
    assert reader.holders(keys)[1] == ()
    assert {block.block_id for block in reader.list()} == {5, 7, 9}
    a.node.close()
    assert [engine.name for engine in reader.engines()] == ["b"]
    assert {block.engine for block in reader.list()} == {"b"}
    with pytest.raises(MisuseError, match="prefix_keys"):
        reader.holders(["k"])


def test_a_reset_is_seen_as_another_epoch(toys: Toys, reader: Reader) -> None:
    a = toys.join("a")
    a.compute(a.node.keys(range(TOKENS)), [0])
    (before,) = reader.engines()
    a.node.reset()
    assert a.node.wait_joined()
    (after,) = reader.engines()
    assert before.epoch != after.epoch == a.table.epoch
    assert list(reader.list()) == []


@pytest.mark.parametrize("known", [True, False], ids=["known before", "never seen"])
def test_a_killed_engine_has_no_blocks(alone: tuple[Peer, Config], known: bool) -> None:
    """Its socket is still there, or its memory still mapped here."""
    peer, config = alone
    with Reader(config) as reader:
        if known:
            assert len(list(reader.list())) == 6
            assert reader.engines()[0].alive
        peer.kill()
        assert [engine.alive for engine in reader.engines()] == [False] * known
        assert list(reader.list()) == []
        assert reader.holders(keys_of(0)) == ((),) * 6


def test_a_stopped_engine_is_left_out_or_read_as_it_stands(
    alone: tuple[Peer, Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, config = alone
    with Reader(config) as reader:
        assert len(list(reader.list())) == 6
        peer.stop()
        assert len(list(reader.list())) == 6  # its memory is here
    monkeypatch.setattr(reader_module, "READ_SECONDS", 0.2)
    with Reader(config) as late:
        assert late.engines() == ()
        assert list(late.list()) == []
        peer.go_on()
        wait_until(lambda: len(list(late.list())) == 6, "it answers")


def test_neither_directory_nor_coordinator_is_needed(tmp_path: Path) -> None:
    with Reader(Config(run_dir=str(tmp_path / "none"))) as reader:
        assert reader.engines() == ()
        assert list(reader.list()) == []


def test_a_closed_reader_reads_no_more(toys: Toys, reader: Reader) -> None:
    toys.join("a")
    assert len(reader.engines()) == 1
    reader.close()
    reader.close()
    for call in (reader.engines, lambda: list(reader.list()), lambda: reader.holders([])):
        with pytest.raises(MisuseError, match="make another Reader"):
            call()


# -- files that are no engine's


def serve_once(path: Path, reply: bytes, fds: list[int]) -> threading.Thread:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as client:
            client.recv(4096)
            if reply:
                socket.send_fds(client, [reply], fds)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def memory(nbytes: int, content: bytes = b"") -> int:
    fd = os.memfd_create("t")
    os.truncate(fd, nbytes)
    os.pwrite(fd, content, 0)
    return fd


FOUND = msgspec.msgpack.encode(Reply(True))


@pytest.mark.parametrize(
    ("reply", "make"),
    [
        (b"", list),
        (b"\xff\xff", list),
        (FOUND, list),
        (FOUND, lambda: [memory(0)]),
        (FOUND, lambda: [memory(1 << 16)]),
        (FOUND, lambda: [memory(1 << 16, b"\xff" * (1 << 16))]),
        (FOUND, lambda: list(os.pipe())),
        (FOUND, lambda: [os.open("/dev/zero", os.O_RDONLY)]),
        (msgspec.msgpack.encode(Reply(False, "x" * 1000)), list),
    ],
    ids=["nothing", "garbage", "no memory", "empty", "zeros", "ones", "pipes", "device", "no"],
)
def test_a_lying_engine_is_left_out(
    toys: Toys, place: Node, reader: Reader, reply: bytes, make: object
) -> None:
    a = toys.join("a")
    a.compute(a.node.keys(range(TOKENS)), [0])
    path, fds = engine_socket(place.run_dir, place.namespace, 7), make()
    thread = serve_once(path, reply, fds)
    try:
        assert [engine.name for engine in reader.engines()] == ["a"]
        assert len(list(reader.list())) == 1
        thread.join()
    finally:
        path.unlink()
        for fd in fds:
            os.close(fd)


def test_other_files_of_that_name_are_left_out(toys: Toys, place: Node, reader: Reader) -> None:
    toys.join("a")
    paths = [engine_socket(place.run_dir, place.namespace, epoch) for epoch in (7, 8, 9)]
    paths[0].write_text("x")
    paths[1].symlink_to("nowhere")
    paths[2].mkdir()
    try:
        assert [engine.name for engine in reader.engines()] == ["a"]
    finally:
        paths[0].unlink()
        paths[1].unlink()
        paths[2].rmdir()


def test_a_silent_engine_is_waited_for_a_moment_only(
    toys: Toys, place: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys.join("a")
    path = engine_socket(place.run_dir, place.namespace, 7)
    monkeypatch.setattr(reader_module, "READ_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(path))
        silent.listen()
        with Reader(Config(run_dir=str(place.run_dir), namespace=place.namespace)) as reader:
            assert [engine.name for engine in reader.engines()] == ["a"]
    path.unlink()
