"""What every number of a benchmark comes with: how it is spread, and from which commit it is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import measurement
import pytest
from measurement import commit, percentiles, report

WRITTEN = ("README.md", "docs/page.md", "docs/plot.svg", "benchmarks/results/a.jsonl")


def test_values_are_told_by_their_percentiles_and_ends() -> None:
    values = [5.0, 1.0, 2.0, 3.0, 4.00049]
    assert percentiles(values) == {"p50": 3.0, "p99": 4.96, "min": 1.0, "max": 5.0, "n": 5}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of git with one commit."""
    for name in ("program.py", *WRITTEN):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    return tmp_path


def git(tree: Path, *arguments: str) -> str:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    command = ["git", "-C", str(tree), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_number_names_its_commit(tree: Path) -> None:
    at = git(tree, "rev-parse", "HEAD").strip()
    assert len(at) == 40
    assert commit(tree) == at
    assert commit(tree / "docs") == ""  # it lies in somebody else's tree
    (tree / "program.py").write_text("two\n")
    assert commit(tree) == f"{at}-dirty"


def test_what_benchmarks_write_is_no_change(tree: Path) -> None:
    clean = commit(tree)
    for name in WRITTEN:
        (tree / name).write_text("two\n")
    assert commit(tree) == clean


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit(tmp_path) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == ""


def test_a_line_says_where_with_what_and_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurement, "commit", lambda: "c0ffee")
    monkeypatch.setattr("sys.argv", ["bench_this.py", "--rows", "64 KiB"])
    report("this", milliseconds=percentiles([1, 2]))
    line = json.loads(capsys.readouterr().out)
    assert (line["benchmark"], line["milliseconds"]["n"], line["commit"]) == ("this", 2, "c0ffee")
    assert line["command"].endswith(" bench_this.py --rows '64 KiB'")
    assert {*line["machine"]} == {"cpu", "vectors", "cores", "kernel", "load"}
    assert "python" in line["versions"]
