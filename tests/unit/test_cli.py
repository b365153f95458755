"""The command ``kvshm``, as a shell runs it."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from kvshm._base.ids import BlockHash, BlockId, Generation, LeaseBit
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm.tools import cli, dump_index
from kvshm.tools.output import Json
from kvshm.tools.report import Filters

from .served import ServedNode


def kvshm(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVSHM_", "XDG_"))}
    command = [sys.executable, "-m", "kvshm.tools.cli", *arguments]
    return subprocess.run(command, env=clean | environ, capture_output=True, text=True)


def test_dump_index_gets_the_rest_of_the_command_line() -> None:
    nobody = kvshm("dump-index", "--namespace", f"t{uuid.uuid4().hex[:8]}", "--json")
    assert (nobody.returncode, nobody.stdout.strip()) == (1, '{\n  "namespaces": []\n}')
    assert "usage: kvshm dump " in kvshm("dump-index", "--help").stdout


@pytest.mark.parametrize("what", [[], ["--check"]])
def test_dump_index_shows_the_place_of_the_settings_unless_options_name_another(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch, what: list[str]
) -> None:
    served.serve("e", 1)
    here, other = str(served.run_dir), f"t{uuid.uuid4().hex[:8]}"

    def status(*option: str, run_dir: str = here, namespace: str = served.namespace) -> int:
        monkeypatch.setenv("KVSHM_RUN_DIR", run_dir)
        monkeypatch.setenv("KVSHM_NAMESPACE", namespace)
        return cli.main(["dump-index", *what, *option])

    assert status() == 0
    assert status(namespace=other) == 1
    assert status("--namespace", served.namespace, namespace=other) == 0
    assert status("--namespace", other) == 1
    assert status(run_dir="/nowhere") == 1
    assert status("--run-dir", here, run_dir="/nowhere") == 0
    assert status("--run-dir", "/nowhere") == 1


@pytest.mark.parametrize(
    ("setting", "option"), [({}, []), ({"KVSHM_NAMESPACE": "n"}, ["--namespace", ""])]
)
def test_dump_index_shows_all_namespaces_where_none_is_named(
    served: ServedNode,
    monkeypatch: pytest.MonkeyPatch,
    setting: dict[str, str],
    option: list[str],
) -> None:
    looked: list[str | None] = []

    def build_report(run_dir: Path, namespace: str | None, filters: Filters) -> Json:
        looked.append(namespace)
        return {"namespaces": []}

    monkeypatch.setattr(dump_index, "build_report", build_report)
    monkeypatch.setattr(os, "environ", {**setting, "KVSHM_RUN_DIR": str(served.run_dir)})
    assert cli.main(["dump", *option]) == 1
    assert set(looked) == {None}


def test_dump_index_names_a_bad_namespace_and_does_not_look_at_the_other_settings() -> None:
    for called, bad in (
        ("KVSHM_NAMESPACE", kvshm("dump-index", KVSHM_NAMESPACE="Not One")),
        ("--namespace", kvshm("dump-index", "--namespace", "Not One")),
        ("--namespace", kvshm("clean", "--namespace", "Not One")),
    ):
        assert (bad.returncode, bad.stdout) == (2, "")
        assert f": {called}='Not One' is not 1 to 32 of a-z" in bad.stderr
    assert kvshm("dump-index", KVSHM_NAMESPACE="none-such", KVSHM_ROLE="reader").returncode == 1


def test_a_wrong_command_line_is_reported() -> None:
    for wrong in ([], ["drop"], ["config", "--all"]):
        done = kvshm(*wrong)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: kvshm")


def test_alone_it_prints_its_help_to_those_who_made_a_mistake() -> None:
    alone, asked = kvshm(), kvshm("--help")
    assert (alone.returncode, alone.stdout) == (2, "")
    assert (asked.returncode, asked.stdout) == (0, alone.stderr)
    for verb in cli.COMMANDS:
        assert re.search(rf"^    {verb}(?: \(dump-index\))?\s+\w", asked.stdout, re.MULTILINE)
    assert "``" not in asked.stdout


@pytest.mark.parametrize("called", ["cli config", "cli dump-index", "dump_index"])
def test_a_reader_that_stops_reading_is_no_error(served: ServedNode, called: str) -> None:
    served.serve("e", 1)
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", *f"kvshm.tools.{called}".split()],
        env={**os.environ, "KVSHM_RUN_DIR": str(served.run_dir)},
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


EVIL = "e\x1b[2J\n\u202ex\x07"


@pytest.mark.parametrize("command", [["status"], ["dump"], ["doctor"], ["holders"]])
def test_texts_of_other_processes_are_harmless_for_a_terminal(
    served: ServedNode, command: list[str]
) -> None:
    importer, exporter = served.serve(EVIL, 1, model=EVIL).table, served.serve("x", 2).table
    importer.log_error(EVIL)
    importer.set_lease_bit(LeaseBit(3))
    exporter.set_life(0)
    record = BlockRecord(BlockHash(bytes(32)), BlockId(0), Generation(0), 0)
    exporter.publish(pack_records([record]), bytes(8))
    exporter.lease(LeaseBit(3), pack_records([record]))
    for options in ([], ["--engine", EVIL[:-1]]) if command != ["doctor"] else ([],):
        done = kvshm(*command, *options, KVSHM_RUN_DIR=str(served.run_dir))
        shown = done.stdout + done.stderr
        assert not [char for char in shown if char != "\n" and not char.isprintable()], shown
        assert "e?[2J??x" in shown


@pytest.mark.parametrize("command", ["status", "dump", "metrics", "top --once", "doctor"])
def test_neither_a_closed_output_nor_its_encoding_is_an_error(
    served: ServedNode, command: str
) -> None:
    served.serve("é", 1, model="é")
    environ = os.environ | {"KVSHM_RUN_DIR": str(served.run_dir), "PYTHONIOENCODING": "ascii"}
    run = f"{sys.executable} -m kvshm.tools.cli {command}"
    for ending in ("", ">&-"):
        done = subprocess.run(["sh", "-c", f"{run} {ending}"], env=environ, capture_output=True)
        assert b"Traceback" not in done.stderr, done.stderr


def test_arguments_that_cannot_be_used_are_reported(subtests: pytest.Subtests) -> None:
    for wrong in [
        "top --interval 1e10",
        "status --loop-seconds nan",
        "kv dump file --limit 1.5",
        "kv compare file file --tolerance -1",
        "metrics --listen a..b:80",
        "metrics --output ",
        "metrics --output /x/y/z",
        "metrics --output /dev/null",
    ]:
        with subtests.test(wrong=wrong):
            done = kvshm(*wrong.split(" "))
            assert (done.returncode, done.stdout) == (2, "")
            assert "Traceback" not in done.stderr
            assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
