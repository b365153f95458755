"""The coordinator reads the settings of the environment and the file; its options come before
them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .processes import Node, wait_until

pytestmark = pytest.mark.multiprocess

TYPO = {"KVSHM_NAMSPACE": "x", "KVSHM_PORT": "tcp://10.0.0.1:5555"}


def coordinator(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return started("--run-dir", "/no/such/place", *options, **environ)


def started(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVSHM_")}
    command = [sys.executable, "-m", "kvshm.coordinator", *options]
    return subprocess.run(command, env=clean | environ, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("environ", "options", "warns"),
    [
        ("error", (), False),
        ("warning", (), True),
        ("error", ("--log-level", "warning"), True),
        ("debug", ("--log-level", "error"), False),
    ],
)
def test_the_log_level_is_the_environments_unless_the_option_is_given(
    environ: str, options: tuple[str, ...], warns: bool
) -> None:
    done = coordinator(*options, KVSHM_LOG_LEVEL=environ, **TYPO)
    assert ("unknown-setting" in done.stderr) == warns
    assert done.returncode == 4


def test_a_bad_setting_is_named_with_the_remedy() -> None:
    done = coordinator(KVSHM_LOG_LEVEL="loud")
    assert done.returncode == 2
    assert "KVSHM_LOG_LEVEL='loud' is not debug, info, warning or error; correct it" in done.stderr
    done = coordinator("--namespace", "Foo Bar")
    assert done.returncode == 2
    assert done.stderr.startswith("kvshm-coordinator: --namespace='Foo Bar' is not 1 to 32 of a-z")
    done = coordinator(KVSHM_TEST_TIME_SCALE="fast")
    assert done.returncode == 2
    assert "KVSHM_TEST_TIME_SCALE='fast': wanted a number above 0" in done.stderr


def test_each_line_may_be_an_object_of_json(node: Node) -> None:
    process = node.coordinator("--log-format", "json")
    assert process.terminate() == 0
    said = [json.loads(line) for line in str(process.err).splitlines()]
    assert [line["event"] for line in said] == ["serving", "ended"]
    assert {(line["component"], line["pid"]) for line in said} == {("coordinator", process.pid)}
    assert said[0]["fields"]["namespace"] == node.namespace
    done = coordinator("--log-format", "json")
    (last,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert (last["event"], last["level"]) == ("fatal", "error")
    assert "/no/such/place" in last["fields"]["reason"]


def test_a_file_takes_the_lines_and_is_made_again_when_it_is_moved_away(
    node: Node, tmp_path: Path
) -> None:
    path = tmp_path / "kvshm.log"
    process = node.start_coordinator("--log-file", str(path))
    wait_until(lambda: path.exists() and "event=serving" in path.read_text(), "the first line")
    path.rename(tmp_path / "kvshm.log.1")
    assert process.terminate() == 0
    assert "event=ended" in path.read_text()
    assert str(process.err) == ""


def test_a_full_disk_ends_nothing(node: Node) -> None:
    process = node.coordinator("--log-file", "/dev/full")
    assert process.terminate() == 0
    events = [line.split()[2] for line in str(process.err).splitlines()]
    assert events == ["event=not-in-file", "event=serving", "event=ended"]


def test_a_folder_that_is_not_there_stops_the_start() -> None:
    done = coordinator("--log-file", "/no/such/folder/x.log")
    assert done.returncode == 2
    assert "'/no/such/folder/x.log' cannot be opened: No such file or directory" in done.stderr


def test_the_file_counts_where_neither_option_nor_variable_does(tmp_path: Path) -> None:
    file = tmp_path / "kvshm.toml"
    file.write_text("run_dir = '/no/such/file'\nlog_level = 'error'\n")
    done = coordinator(KVSHM_CONFIG=str(file), **TYPO)
    assert done.returncode == 4
    assert "unknown-setting" not in done.stderr
    assert "run directory /no/such/place cannot be used" in done.stderr
    done = started(KVSHM_CONFIG=str(file), KVSHM_LOG_LEVEL="warning", **TYPO)
    assert done.returncode == 4
    assert "unknown-setting" in done.stderr
    assert "run directory /no/such/file cannot be used" in done.stderr
    file.write_text("rundir = '/run/kvshm'")
    done = started(KVSHM_CONFIG=str(file))
    assert (done.returncode, done.stderr) == (
        2,
        f"kvshm-coordinator: {file}: rundir is not a setting of kvshm; did you mean run_dir?\n",
    )
