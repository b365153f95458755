"""The index dump, from real segments handed out in this process to lines on the screen."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvshm
from kvshm._base.ids import BlockHash, BlockId, Epoch, Generation, LeaseBit
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.statistics import (
    BYTES_COPIED,
    IMPORTED_TOKENS,
    LOADS_FAILED,
    LOADS_STARTED,
    LOOKUP_HITS,
    LOOKUPS,
)
from kvshm.tools import cli
from kvshm.tools.render import render
from kvshm.tools.report import Filters, build_report

from .dumps import (
    DEAD_PID,
    chain_of,
    coordinator_of,
    dies,
    engine,
    hash_of,
)

# -- the report


def test_engines_are_described(dumped, busy):
    found = engine(dumped.report(), "exporter")
    described = {name: found[name] for name in ("pid", "alive", "epoch", "model", "block_size")}
    assert described == {
        "pid": os.getpid(),
        "alive": True,
        "epoch": "000000000000000a",
        "model": "a-model",
        "block_size": 16,
    }
    assert found["fingerprint"] == bytes(range(32)).hex()
    assert found["states"] == {"empty": 19, "ready": 6, "draining": 1, "leased": 2, "held": 0}
    assert found["life"] == ["valid", "valid"]
    assert found["lease_bit"] == 0
    assert found["counters"] == {"published": 7}
    (error,) = found["errors"]
    assert (error["times"], error["text"]) == (1, "the dog ate it")
    assert 0 < error["first_ns"] == error["last_ns"], "when it came first, and when last"
    assert found["problems"] == []
    assert engine(dumped.report(), "importer")["life"] == ["ended", "valid"]
    assert [engine(dumped.report(), name)["alive"] for name in ("importer", "crashed")] == [
        True,
        False,
    ]


def test_leased_blocks_have_a_reference_count_and_holders_by_name(dumped, busy):
    blocks = engine(dumped.report(), "exporter")["blocks"]
    listed = [
        (b["block_id"], b["state"], b["references"], [h["engine"] for h in b["holders"]])
        for b in blocks
    ]
    assert listed == [
        (0, "ready", 1, ["importer"]),
        (1, "draining", 2, ["importer", "crashed"]),
    ]
    assert [h["alive"] for h in blocks[1]["holders"]] == [True, False]


def test_held_blocks_are_counted_and_say_for_how_long(dumped, busy, capsys):
    dumped.run("--entries")
    assert not re.findall(r"\bheld\b", capsys.readouterr().out), "nothing is held"
    assert busy.exporter.hold(busy.exporter.scan(), 60) == 6
    busy.exporter.retract([BlockId(2)])
    assert engine(dumped.report(), "exporter")["states"]["held"] == 5
    assert engine(dumped.report(), "importer")["states"]["held"] == 0
    blocks = engine(dumped.report(entries=True), "exporter")["blocks"]
    assert {b["block_id"]: 55 < b["held_seconds"] <= 61 for b in blocks} == {
        0: True, 1: False, 3: True, 11: True, 12: True, 23: True,
    }  # fmt: skip
    assert [b["held_seconds"] for b in blocks if b["block_id"] == 1] == [0]
    dumped.run("--entries")
    shown = capsys.readouterr().out
    assert re.search(r"leased +held +bit", shown)
    assert re.search(r"leased by +held for\n", shown)
    assert len(re.findall(r"  (?:5|6)\d s\n", shown)) == 5


def test_of_two_engines_with_one_bit_the_living_one_holds_it(dumped, busy):
    for name, epoch in ("before", 0x1), ("zombie", 0xE):
        table = dumped.engine(name, epoch).table
        table.set_lease_bit(LeaseBit(3))
        dies(table)
    blocks = engine(dumped.report(), "exporter")["blocks"]
    assert blocks[0]["holders"][0]["engine"] == "importer"


def test_a_bit_no_one_claims_has_an_unknown_holder(dumped):
    table = dumped.engine("lonely", 1).table
    records, parents = chain_of("a")
    table.publish(pack_records(records), parents)
    table.set_life(0)
    table.set_life(1)
    assert table.lease(LeaseBit(9), pack_records(records))[0] == 1
    holder = dumped.report()["engines"][0]["blocks"][0]["holders"][0]
    assert (holder["bit"], holder["engine"], holder["pid"]) == (9, None, None)
    assert "unknown (bit 9)" in "".join(render(build_report(dumped.run_dir, None, Filters())))


def test_chains_are_reported_by_their_last_block_the_longest_first(dumped, busy):
    chains = engine(dumped.report(), "exporter")["chains"]
    assert [(c["tip"], c["length"], c["depth"], c["complete"]) for c in chains] == [
        (3, 4, 3, True),
        (23, 3, 2, True),
        (12, 2, 2, False),
    ]


def test_replicas_list_their_rows_and_if_asked_their_entries(dumped, busy):
    [replica] = [r for r in dumped.report()["replicas"] if r["engine"] == "importer"]
    assert (replica["engine"], replica["count"], replica["capacity"]) == ("importer", 4, 64)
    rows = [(r["engine"], r["epoch"], r["state"], r["entries"]) for r in replica["rows"]]
    assert rows == [("exporter", "000000000000000a", "live", 4)]
    assert replica["entries"] == []
    entries = dumped.report(entries=True, engine="importer")["replicas"][0]["entries"]
    assert sorted(e["block_id"] for e in entries) == [0, 1, 2, 3]
    assert {e["epoch"] for e in entries} == {"000000000000000a"}


def test_a_replica_that_has_grown_is_the_larger_one(dumped, busy):
    records = [
        BlockRecord(BlockHash(random.Random(i).randbytes(32)), BlockId(i), Generation(0), i)
        for i in range(200)
    ]
    row = busy.replica.add_row(Epoch(0xD), "other", 200, LeaseBit(1))
    busy.replica.apply(row, pack_records(records))
    replicas = dumped.report(engine="importer")["replicas"]
    assert [(r["count"], r["capacity"]) for r in replicas] == [(204, 512)]


# -- filters


@pytest.mark.parametrize("wanted", ["crashed", str(DEAD_PID), "000000000000000c", "0x" + "c" * 16])
def test_an_engine_is_chosen_by_name_pid_or_epoch(dumped, busy, wanted):
    found = [e["engine"] for e in dumped.report(engine=wanted)["engines"]]
    assert found == ([] if wanted.endswith("cccc") else ["crashed"])


def test_engine_filters_the_replicas_too(dumped, busy):
    found = dumped.report(engine="importer")["replicas"]
    assert [replica["engine"] for replica in found] == ["importer"]


def test_a_hash_finds_blocks_chains_and_replica_entries(dumped, busy):
    report = dumped.report(block_hash=b"d".hex())
    assert [e["engine"] for e in report["engines"]] == ["exporter"]
    assert [b["block_id"] for b in engine(report, "exporter")["blocks"]] == [3]
    assert [c["tip"] for c in engine(report, "exporter")["chains"]] == [3]
    assert [[e["block_id"] for e in r["entries"]] for r in report["replicas"]] == [[3]]
    assert dumped.report(block_hash="00")["engines"] == []


def test_a_hash_may_be_given_in_full(dumped, busy):
    report = dumped.report(block_hash=hash_of("a").hex())
    assert [b["block_id"] for b in engine(report, "exporter")["blocks"]] == [0]
    assert [e["block_id"] for e in report["replicas"][0]["entries"]] == [0]


def test_leased_shows_leased_blocks_and_nothing_else(dumped, busy):
    report = dumped.report(leased=True)
    assert [e["engine"] for e in report["engines"]] == ["exporter"]
    found = report["engines"][0]
    assert [b["block_id"] for b in found["blocks"]] == [0, 1]
    assert (found["chains"], found["counters"], found["errors"]) == ([], {}, [])
    assert report["replicas"] == []
    both = dumped.report(leased=True, block_hash=b"b".hex())["engines"][0]["blocks"]
    assert [b["block_id"] for b in both] == [1]


def test_entries_lists_every_block_in_use(dumped, busy):
    blocks = engine(dumped.report(entries=True), "exporter")["blocks"]
    assert [b["block_id"] for b in blocks] == [0, 1, 2, 3, 11, 12, 23]


# -- command line


def test_the_table_names_everything_that_matters(dumped, busy, capsys):
    assert dumped.run() == 0
    text = capsys.readouterr().out
    for expected in (
        f"namespace {dumped.namespace}: no coordinator runs",
        "exporter",
        "crashed",
        "dead",
        "000102030405",
        f"importer (epoch 000000000000000b, pid {os.getpid()}); "
        f"crashed (epoch 000000000000000c, pid {DEAD_PID}), dead",
        f"chains of exporter (epoch 000000000000000a, pid {os.getpid()})",
        "2/2",
        f"replica of importer (epoch 000000000000000b, pid {os.getpid()}): ",
        "published",
        "the dog ate it",
    ):
        assert expected in text
    assert max(len(line) for line in text.splitlines()) < 200


def test_the_table_says_what_each_engine_has_imported(dumped, busy, capsys):
    for counter, number in (
        (LOOKUPS, 9),
        (LOOKUP_HITS, 7),
        (LOADS_STARTED, 6),
        (LOADS_FAILED, 1),
        (IMPORTED_TOKENS, 80),
        (BYTES_COPIED, 4096),
    ):
        busy.importer.counters.add(counter, number)
    dumped.run()
    _, table = capsys.readouterr().out.split("\n  imports\n")
    head, row, *_ = table.splitlines()
    assert head.split() == ["engine", "lookups", "hits", "loads", "failed", "tokens", "bytes"]
    assert row.split() == ["importer", "9", "7", "6", "1", "80", "4096"]


def test_engines_that_do_not_share_are_counted_apart(dumped, capsys):
    for epoch, fingerprint in (1, b"a"), (2, b"b"), (3, b"b"):
        dumped.serve(f"e{epoch}", epoch, fingerprint=fingerprint * 32)
    dumped.run()
    text = capsys.readouterr().out
    assert f"  fingerprint {b'aaaaaa'.hex()}: 1 engine\n" in text
    assert f"  fingerprint {b'bbbbbb'.hex()}: 2 engines\n" in text


def test_json_is_the_report(dumped, busy, capsys):
    assert dumped.run("--json", "--engine", "exporter") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"namespaces": [dumped.report(engine="exporter")]}


def test_long_lists_of_chains_are_cut_unless_everything_is_asked_for(dumped, capsys):
    table = dumped.engine("a", 1).table
    for letter in "abcdefghijklmnopqrstuvwxyz":
        records, parents = chain_of(letter)
        table.publish(pack_records(records), parents)
    dumped.run()
    assert "and 6 shorter ones" in capsys.readouterr().out
    dumped.run("--entries")
    assert "shorter ones" not in capsys.readouterr().out


def test_a_coordinator_without_engines_is_shown_unless_engines_are_asked_for(dumped, capsys):
    with coordinator_of(dumped):
        for option in [], ["--entries"]:
            assert dumped.run(*option) == 0
            shown = capsys.readouterr().out
            assert shown == f"namespace {dumped.namespace}\n\n  no engine is in it\n\n"
        for option in ["--hash", "ff"], ["--leased"]:
            assert dumped.run(*option) == 1
            streams = capsys.readouterr()
            assert streams.out == ""
            lines = "nothing of kvshm found that was asked for\n", "no engine runs in "
            assert streams.err.startswith("".join(lines))


def test_of_a_namespace_without_engines_it_is_said_why_none_is_shown(dumped, busy, capsys):
    with coordinator_of(SimpleNamespace(run_dir=dumped.run_dir, namespace="empty")):
        dumped.run()
        assert "namespace empty\n\n  no engine is in it\n" in capsys.readouterr().out
        dumped.run("--engine", "exporter")
        shown = capsys.readouterr().out
        assert "namespace empty\n\n  no engine that was asked for is in it\n" in shown


def test_nothing_found_is_status_1_and_said(dumped, busy, capsys):
    assert dumped.run("--hash", "ff") == 1
    assert dumped.run("--namespace", uuid.uuid4().hex) == 1
    assert dumped.run("--run-dir", str(dumped.run_dir / "none")) == 1
    streams = capsys.readouterr()
    assert streams.err.count("nothing of kvshm found") == 3
    assert streams.out == ""
    exporter = f"there is engine exporter (epoch 000000000000000a, pid {os.getpid()})"
    assert streams.err.count(f"{exporter} of namespace {dumped.namespace}\n") == 2
    assert streams.err.endswith(f"no engine runs in {dumped.run_dir / 'none'}\n")
    assert dumped.run("--json", "--namespace", "none-such") == 1
    assert json.loads(capsys.readouterr().out) == {"namespaces": []}
    assert not (dumped.run_dir / "none").exists()


@pytest.mark.parametrize("arguments", [["--hash", "xyz"], ["--hash", ""], ["--colour"], ["extra"]])
def test_a_wrong_command_line_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["dump", *arguments])
    assert ended.value.code == 2


@pytest.mark.parametrize("place", ["not/absolute", "/dev/null"])
def test_a_run_directory_that_cannot_be_one_is_status_2_with_a_sentence(place, capsys):
    assert cli.main(["dump", "--run-dir", place]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvshm dump: ")
    assert place in line


FILE = Path(kvshm.__file__).parent / "tools" / "dump_index.py"
WITHOUT = (
    "import sys, runpy; "
    "sys.modules.update(dict.fromkeys(['torch', 'vllm', 'zmq', 'numpy'])); "
    "runpy.run_module('kvshm.tools.dump_index', run_name='__main__')"
)


@pytest.mark.parametrize(
    "how",
    [(str(FILE),), ("-c", WITHOUT)],
    ids=["as a file", "without torch, vLLM and a socket library"],
)
def test_it_runs_in_a_process_of_its_own(dumped, busy, how):
    place = ("--run-dir", str(dumped.run_dir), "--namespace", dumped.namespace)
    environ = {**os.environ, "PYTHONPATH": str(Path(kvshm.__file__).parents[1])}
    command = [sys.executable, *how, *place, "--json"]
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (space,) = json.loads(done.stdout)["namespaces"]
    assert engine(space, "exporter")["pid"] == os.getpid()
