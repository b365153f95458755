"""Records of engines that share nothing: there while their process lives, gone or dead after it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvshm._base.declined import (
    Declined,
    declined_now,
    forget_declined,
    left_declined,
    list_declined,
    record_declined,
)
from kvshm._node.leftovers import clear
from kvshm.config import Config
from kvshm.hooks import boundary
from kvshm.tools.cli import main
from kvshm.tools.node.health import State, judge_node
from kvshm.tools.node.reader import NodeReader

SPACE = "n"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    for name in ("e", "f"):
        forget_declined(name)


def record(run_dir: Path, engine: str = "e", reason: str = "no blocks") -> Declined:
    reported = declined_now(engine, "m", reason, on_purpose=False)
    record_declined(str(run_dir), SPACE, reported)
    return reported


def names(run_dir: Path) -> list[str]:
    return sorted(os.listdir(run_dir))


def test_a_record_is_read_while_its_process_lives(run_dir: Path) -> None:
    reported = record(run_dir)
    assert list_declined(run_dir, SPACE) == list_declined(run_dir, None) == [(SPACE, reported)]
    assert list_declined(run_dir, "other") == []
    assert left_declined(run_dir, SPACE) == []
    (name,) = names(run_dir)
    assert os.stat(run_dir / name).st_mode & 0o777 == 0o600


def test_a_later_reason_takes_the_place_of_the_earlier(run_dir: Path) -> None:
    record(run_dir, reason="first")
    record(run_dir, reason="second")
    record(run_dir, engine="f")
    assert [reported.reason for _, reported in list_declined(run_dir, SPACE)].count("second") == 1
    assert len(names(run_dir)) == 2


def test_it_goes_when_the_engine_shares_after_all(run_dir: Path) -> None:
    record(run_dir)
    forget_declined("e")
    forget_declined("e")
    assert names(run_dir) == []


def test_long_texts_are_cut(run_dir: Path) -> None:
    record(run_dir, reason="é" * 100_000)
    ((_, reported),) = list_declined(run_dir, SPACE)
    assert reported.reason == "é" * 500


DIES = r"""
import os, signal, sys
from kvshm._base.declined import declined_now, record_declined
record_declined(sys.argv[1], sys.argv[2], declined_now("e", "m", "why", on_purpose=True))
if os.fork() == 0:  # a child must not keep the record alive
    os.write(1, b"child\n")  # at once, not in pieces between those of the other
    sys.stdin.read()
    os._exit(0)
os.write(1, b"recorded\n")
sys.stdin.read()
"""


def test_the_record_of_a_killed_process_is_dead_and_cleared(run_dir: Path) -> None:
    command = [sys.executable, "-c", DIES, str(run_dir), SPACE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        assert {one.stdout.readline(), one.stdout.readline()} == {"child\n", "recorded\n"}
        assert [reported.on_purpose for _, reported in list_declined(run_dir, SPACE)] == [True]
        one.kill()
        one.wait()
        assert list_declined(run_dir, SPACE) == []
        assert [str(path) for path in left_declined(run_dir, SPACE)] == clear(
            run_dir, SPACE
        ).removed
        assert names(run_dir) == []


def test_a_process_that_ends_in_order_leaves_nothing(run_dir: Path) -> None:
    command = [sys.executable, "-c", DIES, str(run_dir), SPACE]
    subprocess.run(command, input="", stdout=subprocess.PIPE, text=True, check=True)
    assert names(run_dir) == []


def test_a_record_that_is_just_being_made_is_not_left(run_dir: Path) -> None:
    fresh = run_dir / f"{SPACE}.declined.{'3' * 16}.new"
    fresh.touch()
    assert left_declined(run_dir, SPACE) == []
    os.utime(fresh, (0, 0))
    assert left_declined(run_dir, SPACE) == [fresh]


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b'{"engine": 1}', b"\xff" * 9000])
def test_what_is_no_record_is_left_out(run_dir: Path, contents: bytes) -> None:
    record(run_dir)
    (name,) = names(run_dir)
    os.truncate(run_dir / name, 0)
    (run_dir / name).write_bytes(contents)
    assert list_declined(run_dir, SPACE) == []


def test_other_kinds_of_files_do_not_hold_the_reader_up(run_dir: Path) -> None:
    os.mkfifo(run_dir / f"{SPACE}.declined.{'0' * 16}")
    (run_dir / f"{SPACE}.declined.{'1' * 16}").mkdir()
    (run_dir / f"{SPACE}.declined.{'2' * 16}").symlink_to("/dev/zero")
    assert list_declined(run_dir, SPACE) == []
    assert left_declined(run_dir, SPACE) == []


def test_a_run_directory_that_cannot_be_used_is_no_error(run_dir: Path) -> None:
    record(run_dir / "a" / "b")
    assert names(run_dir) == []


def test_a_look_at_the_node_shows_them(run_dir: Path) -> None:
    config = Config(run_dir=str(run_dir), namespace=SPACE)
    boundary.decline("prefix caching is off", "e", config, "m")
    boundary.decline("KVSHM_SHARE=none", "f", Config(**vars_of(config), share="none"))
    with NodeReader(run_dir) as reader:
        reading = reader.read()
    (space,) = reading.namespaces
    assert (space.name, space.coordinated) == (SPACE, False)
    assert {
        reported.engine: (reported.reason, reported.on_purpose) for reported in space.declined
    } == {
        "e": ("prefix caching is off", False),
        "f": ("KVSHM_SHARE=none", True),
    }
    assert judge_node(reading).state is State.DEGRADED


def test_texts_that_would_disturb_a_terminal_or_an_encoding_are_made_plain(run_dir: Path) -> None:
    record(run_dir, reason="a\x1b[31m\nb\udcff")
    ((_, reported),) = list_declined(run_dir, SPACE)
    assert reported.reason == "a [31m b "
    (name,) = names(run_dir)
    changed = msgspec.structs.replace(reported, reason="a\x1b\n", pid_namespace=1)
    (run_dir / name).write_bytes(msgspec.json.encode(changed))  # by another program
    ((_, reported),) = list_declined(run_dir, SPACE)
    assert (reported.reason, reported.is_here) == ("a  ", False)


def test_engines_asked_not_to_share_are_no_fault_also_in_a_container(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--run-dir", str(run_dir), "--here"]
    boundary.decline("KVSHM_SHARE=none", "f", Config(run_dir=str(run_dir), share="none"))
    assert main(["status", *place]) == 0
    assert "not sharing: KVSHM_SHARE=none" in capsys.readouterr().out
    record(run_dir)
    assert main(["status", *place]) == 1
    assert main(["status", *place, "--probe", "serving"]) == 0
    assert main(["status", *place, "--engine", "e", "--probe", "ready"]) == 1
    assert "not sharing: no blocks" in capsys.readouterr().err


def vars_of(config: Config) -> dict[str, str]:
    return {"run_dir": config.run_dir, "namespace": config.namespace}
