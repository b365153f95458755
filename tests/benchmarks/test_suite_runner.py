"""The suite of benchmarks: it keeps what each prints, of a run that fails as well, and goes on."""

from __future__ import annotations

import json
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import bench_import
import bench_load
import bench_traces
import pytest
import suite
from local_node import wait_until
from suite import BENCHES, RESULTS, SETS, Bench, Peer, run, run_all

TREE = Path(__file__).parents[2]
OPTIONS = {
    "benchmarks/bench_import.py": bench_import._options,
    "benchmarks/bench_load.py": bench_load._options,
    "benchmarks/bench_traces.py": lambda: bench_traces.options_of(sys.argv[1:]),
}
"""Of the programs that run longest, what refuses what would fail after minutes."""
GOOD = "print('{\"benchmark\": \"good\", \"n\": 1}'); print('no result'); print('{no result')"
BAD = f"import sys; {GOOD}; sys.exit({str(TREE)!r} + '/secret: it broke')"


def bench(name: str, program: str) -> Bench:
    return Bench(name, "quick", 1, "does it?", f"-c {shlex.quote(program)}")


def kept(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_that_fails_is_kept_and_the_others_are_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benches = [bench("silent", "pass"), bench("bad", BAD), bench("good", GOOD)]
    assert not run_all(benches, tmp_path)
    (silent,) = kept(tmp_path, "silent")
    assert silent["failed_run"] == {"reason": "it printed no result", "stderr": []}
    line, failed = kept(tmp_path, "bad")
    assert line["benchmark"] == "good"
    assert failed["benchmark"] == "bad"
    assert failed["failed_run"] == {"reason": "status 1", "stderr": [".../secret: it broke"]}
    assert {"machine", "versions", "commit", "command"} <= {*failed}
    assert kept(tmp_path, "good") == [{"benchmark": "good", "n": 1}]
    assert "failed: silent, bad" in capsys.readouterr().err


LEAVES = """
import json, subprocess, sys
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(json.dumps({"benchmark": "leaves", "pid": child.pid}))
"""


def test_what_a_run_leaves_behind_is_ended(tmp_path: Path) -> None:
    assert run_all([bench("leaves", LEAVES)], tmp_path)
    (said,) = kept(tmp_path, "leaves")
    left = Path(f"/proc/{said['pid']}/cmdline")
    for _ in wait_until("it has ended", 10):
        with suppress(OSError):
            if left.read_bytes():
                continue
        break


def test_results_replace_those_of_the_last_run(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text('{"benchmark": "of the last run"}\n')
    assert run_all([bench("good", GOOD)], tmp_path)
    assert kept(tmp_path, "good") == [{"benchmark": "good", "n": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["good.jsonl"]


def test_a_run_without_an_end_is_ended() -> None:
    program = f"{GOOD}; import sys, time; sys.stdout.flush(); time.sleep(1000)"
    lines, wrong = run(bench("hangs", program), ["-c", program], 3.0)
    assert wrong == "no end within 3 s"
    assert [line["benchmark"] for line in lines] == ["good", "hangs"]


def test_what_the_table_names_is_there() -> None:
    assert len({bench.name for bench in BENCHES}) == len(BENCHES)
    assert {bench.set for bench in BENCHES} == {*SETS}
    for each in BENCHES:
        program, *_ = each.arguments()
        assert (TREE / program).is_file(), each.name
        assert each.answers.endswith("?"), each.name
        assert bool(each.needs) <= (each.set != "quick"), f"{each.name} needs a peer"
    assert sum(each.seconds for each in BENCHES if each.set == "quick") <= 600


@pytest.mark.parametrize("row", [b.name for b in BENCHES if b.arguments()[0] in OPTIONS])
def test_what_runs_long_takes_its_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: str
) -> None:
    (tmp_path / "lmcache" / "lmcache").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.chdir(TREE)
    (each,) = (bench for bench in BENCHES if bench.name == row)
    arguments = each.arguments()
    monkeypatch.setattr(sys, "argv", arguments)
    assert OPTIONS[arguments[0]]()


def test_every_file_of_results_has_its_row() -> None:
    names = {path.name.removesuffix(".jsonl") for path in RESULTS.iterdir()}
    assert names
    assert names <= {each.name for each in BENCHES}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["full", "--only", "lookup"], "full has load-engines"),
    ],
    ids=str,
)
def test_what_the_table_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["suite.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_nothing_runs_before_the_peers_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["suite.py", "peers", "--out", str(tmp_path / "out")])
    (tmp_path / "mooncake" / "mooncake_transfer_engine_non_cuda-1.2.dist-info").mkdir(parents=True)
    (tmp_path / "mooncake" / next((tmp_path / "mooncake").iterdir()) / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: m\nVersion: 1.2\n"
    )
    assert suite.main() == 2
    printed = capsys.readouterr().out
    assert re.search("lmcache in .*lmcache: is missing: `make bench-peers`", printed)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(
        suite, "PEERS", {"mooncake": Peer("mooncake", "mooncake-transfer-engine-non-cuda")}
    )
    assert suite.installed("mooncake") == "1.2"
