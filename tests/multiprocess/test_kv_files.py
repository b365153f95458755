"""Blocks in files: written from engines that reuse theirs all the time, served to others."""

from __future__ import annotations

import hashlib
import random
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import kvshm
from kvshm.tools.kv.block_file import BlockFile, Description
from kvshm.tools.kv.dump import NothingToDump, Wanted, read_engine

from .processes import PATIENCE_SECONDS, Managed, Node, fresh_node, wait_until
from .toys import finish, more, result, start, table_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

REGION_BYTES = 4096
SMALL = ("--region-bytes", str(REGION_BYTES), "--ranks", "2")
RESTING = (*SMALL, "--peers", "0", "--loads", "0")
"""An engine that computes some requests and then stays readable."""


@pytest.fixture
def node() -> Iterator[Node]:
    with fresh_node() as node:
        node.coordinator()
        yield node


def kv(node: Node, *arguments: str, **settings: str) -> Managed:
    place = {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace}
    argv = (sys.executable, "-m", "kvshm.tools.cli", "kv", *arguments)
    return node.processes.start(f"kv-{arguments[0]}", *argv, environ={**place, **settings})


def dumped(node: Node, path: Path, *options: str) -> BlockFile:
    process = kv(node, "dump", str(path), *options)
    assert process.wait() == 0, process.account()
    return BlockFile(path)


def serving(node: Node, path: Path, **settings: str) -> Managed:
    process = kv(node, "serve", str(path), **settings)
    process.wait_out(lambda line: line.startswith("serving"))
    return process


def wrong_rows(what: Description, arrays: list[list[object]], model: bytes = b"toy") -> int:
    wrong = 0
    for rank, regions in enumerate(arrays):
        for region, rows in enumerate(regions):
            for block, row in zip(what.blocks, rows, strict=True):
                seed = block.key + bytes([rank, region]) + model
                line = hashlib.blake2b(seed, digest_size=64).digest()
                wrong += bytes(row) != line * (REGION_BYTES // 64)
    return wrong


def arrays_of(file: BlockFile) -> list[list[object]]:
    count, found = len(file.what.blocks), [[] for _ in file.what.regions]
    for name, rank, _, _ in file.what.tensors():
        found[rank].append(file.rows(name, 0, count))
    return found


def chains_hold(what: Description) -> bool:
    """Whether each block's parent is the block before it in a toy engine's chain."""
    keys = {
        hashlib.sha256(f"{f}/{d}".encode()).digest(): (f, d) for f in range(6) for d in range(99)
    }
    for block in what.blocks:
        family, depth = keys[block.key]
        before = hashlib.sha256(f"{family}/{depth - 1}".encode()).digest()[:8]
        if (block.depth, block.parent) != (depth, before if depth else bytes(8)):
            return False
    return True


def test_no_torn_block_is_written_while_the_engine_reuses_all_of_them(node: Node) -> None:
    busy = start(node, 1, *SMALL, "--peers", "0", "--requests", "10000000", "--loads", "0")
    busy.wait_out(lambda line: line == "go")
    changed = kept = 0
    while not (changed and kept > 50):
        try:
            found = read_engine(node.run_dir, node.namespace, Wanted())
        except NothingToDump:  # every block was reused
            changed += 1
            continue
        assert wrong_rows(found.what, found.arrays) == 0
        assert chains_hold(found.what)
        changed, kept = changed + found.changed, kept + len(found.what.blocks)


def test_what_changes_between_copy_and_check_is_left_out(node: Node, tmp_path: Path) -> None:
    engine = start(node, 1, *RESTING, "--requests", "30")
    result(engine)
    path = tmp_path / "file"
    dump = kv(node, "dump", str(path), KVSHM_TEST_SYNC_POINT="COPIED:stop")
    wait_until(lambda: dump.is_stopped, "the dump to stop")
    more(engine)  # reuses all of its blocks
    dump.signal(signal.SIGCONT)
    assert dump.wait() == 1
    dump.wait_err("blocks were reused while they were read")
    assert list(tmp_path.iterdir()) == []


def test_a_file_holds_what_the_engine_had_published(node: Node, tmp_path: Path) -> None:
    engine = start(node, 1, *RESTING)
    result(engine)
    file = dumped(node, tmp_path / "file")
    with closing(table_of(node, engine)) as table:
        published = {bytes(slot.block_hash) for slot in table.slots() if slot.state.name == "READY"}
    what = file.what
    assert {block.key for block in what.blocks} == published
    assert wrong_rows(what, arrays_of(file)) == 0
    assert chains_hold(what)
    assert (what.block_size, what.model, what.fields["weights"]) == (16, "toy", "toy")
    assert what.regions == [[REGION_BYTES] * 2] * 2
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_keys_bring_the_blocks_before_them_and_a_limit_takes_the_first(
    node: Node, tmp_path: Path
) -> None:
    result(start(node, 1, *RESTING))
    all_of_them = dumped(node, tmp_path / "all").what.blocks
    last = max(all_of_them, key=lambda block: block.depth)
    file = dumped(node, tmp_path / "chain", "--keys", last.key.hex()[:20])
    by_tag = {block.key[:8]: block for block in all_of_them}
    chain = [last]
    while (before := by_tag.get(chain[0].parent)) is not None:
        chain.insert(0, before)
    assert len(chain) > 1
    assert file.what.blocks == chain
    first = dumped(node, tmp_path / "first", "--limit", "3").what.blocks
    assert first == all_of_them[:3]


def test_an_engine_is_named_where_there_are_several(node: Node, tmp_path: Path) -> None:
    engines = [start(node, seed, *RESTING) for seed in (1, 2)]
    for engine in engines:
        result(engine)
    dump = kv(node, "dump", str(tmp_path / "file"))
    assert dump.wait() == 1
    assert "several engines are meant" in str(dump.err)
    file = dumped(node, tmp_path / "file", "--engine", str(engines[1].pid))
    assert file.what.engine == f"toy-{engines[1].pid}"


def test_engines_of_the_same_fingerprint_import_from_a_file(node: Node, tmp_path: Path) -> None:
    exporter = start(node, 1, *RESTING)
    result(exporter)
    count = len(dumped(node, tmp_path / "file").what.blocks)
    exporter.kill()
    server = serving(node, tmp_path / "file", KVSHM_VERIFY="1")
    (tmp_path / "file").unlink()
    importer = start(node, 2, *SMALL, "--requests", "20", "--imported", "30")
    (outcome,) = finish([importer])
    assert outcome["wrong"] == 0
    assert outcome["imported"] >= 30
    assert outcome["counters"]["verified"] > 0
    for epoch in node.sockets():
        with closing(node.segments.view(epoch)) as table:
            assert table.num_blocks == count
            assert not table.counters.snapshot()["loads_started"]
            assert table.check_integrity() == []
    assert server.terminate() == 0
    assert node.sockets() == []


def test_a_joined_node_imports_what_another_one_had(node: Node, tmp_path: Path) -> None:
    """The same over the public surface, which has keys and a fingerprint of its own."""
    config = kvshm.Config(run_dir=str(node.run_dir), namespace=node.namespace)
    count, size, tokens = 4, 64, list(range(4 * 16))

    def joined(name: str) -> tuple[kvshm.Node, memoryview]:
        memory = kvshm.allocate(count * size)
        identity = kvshm.Identity(engine="test 1", model="m", weights="w")
        place = {"memory": memory, "regions": [kvshm.Region(0, size, size, count)]}
        engine = kvshm.join(identity, **place, block_size=16, name=name, config=config)
        assert engine.wait_joined(PATIENCE_SECONDS)
        return engine, memory.buffer

    one, memory = joined("one")
    with one:
        memory[:] = written = random.Random(7).randbytes(count * size)
        keys = one.keys(tokens)
        assert one.publish(keys, range(count)) == count
        file = dumped(node, tmp_path / "file", "--model", "m")
    assert [block.key for block in file.what.blocks] == keys
    serving(node, tmp_path / "file")
    other, memory = joined("other")
    with other:
        found = other.wait_for(keys, PATIENCE_SECONDS)
        load = other.load(found, into=range(count))
        assert load.wait(PATIENCE_SECONDS) is kvshm.LoadState.DONE
        assert (load.good, bytes(memory)) == (count, written)


def test_an_engine_of_another_fingerprint_is_refused_and_the_reason_logged(
    node: Node, tmp_path: Path
) -> None:
    exporter = start(node, 1, *RESTING)
    result(exporter)
    dumped(node, tmp_path / "file")
    exporter.kill()
    server = serving(node, tmp_path / "file")
    other = start(node, 2, *RESTING, "--model", "other")
    server.wait_err("cannot share with this one: weights is toy here, other there")
    (outcome,) = finish([other])
    assert outcome["imported"] == outcome["loads"] == 0


def test_a_server_killed_while_it_is_read_delivers_nothing_wrong(
    node: Node, tmp_path: Path
) -> None:
    exporter = start(node, 1, *RESTING)
    result(exporter)
    dumped(node, tmp_path / "file")
    exporter.kill()
    server = serving(node, tmp_path / "file")
    stop = {"KVSHM_TEST_SYNC_POINT": "COPIED:stop"}
    importer = start(node, 2, *SMALL, "--loads", "1", "--imported", "0", **stop)
    wait_until(lambda: importer.is_stopped, "the importer to stop")
    server.kill()
    importer.signal(signal.SIGCONT)
    (outcome,) = finish([importer])
    assert outcome["wrong"] == outcome["imported"] == 0
    assert outcome["counters"]["recheck_failed"] > 0


def test_without_a_coordinator_the_dump_says_what_to_start(tmp_path: Path) -> None:
    with fresh_node() as node:
        result(start(node, 1, *RESTING, "--unshared"))
        dump = kv(node, "dump", str(tmp_path / "file"))
        assert dump.wait() == 1
        dump.wait_err(f"kvshm-coordinator --run-dir {node.run_dir}.* is needed")
