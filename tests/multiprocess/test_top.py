"""``kvshm top`` in a real terminal, beside eight engines that import from each other, of which two
are killed and one is stopped."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from subprocess import PIPE

import pytest

from kvshm._shm.slot_table import SlotTableView

from . import toys
from .processes import Managed, Node, fresh_node
from .terminals import Terminal, terminal, tmux_is_missing

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(tmux_is_missing(), reason="KVSHM TOP NOT CHECKED: no tmux"),
]
WIDE, NARROW = (200, 50), (80, 24)
RATE = re.compile(r"([\d.]+) ([kMGT]?)B/s shm")


class Traffic:
    def __init__(self, engines: list[Managed]) -> None:
        self._engines = engines
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            toys.all_more(self._engines)

    def close(self) -> None:
        self._end.set()
        self._thread.join()


@dataclass
class Busy:
    node: Node
    coordinator: Managed
    engines: list[Managed]
    tables: list[SlotTableView]

    @property
    def bytes_copied(self) -> int:
        return sum(table.counters.snapshot()["bytes_copied"] for table in self.tables)


@pytest.fixture(scope="module")
def busy() -> Iterator[Busy]:
    with fresh_node() as node:
        coordinator = node.coordinator()
        options = ("--requests", "10", "--peers", "7")
        engines = [toys.start(node, seed, *options) for seed in range(8)]
        for engine in engines:
            toys.result(engine)
        tables = [toys.table_of(node, engine) for engine in engines[:5]]
        traffic = Traffic(engines[:5])
        try:
            yield Busy(node, coordinator, engines, tables)
        finally:
            traffic.close()
            for table in tables:
                table.close()


def command(node: Node, *options: str) -> list[str]:
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    return [sys.executable, "-P", "-m", "kvshm.tools.cli", "top", *place, *options]


def in_shell(node: Node, *options: str, stdin: str = "") -> list[str]:
    return [
        "sh",
        "-c",
        f'trap : INT; "$@" {stdin}; echo "ended with $?"; exec cat',
        "sh",
        *command(node, *options),
    ]


def keys_of(shown: Terminal) -> set[str]:
    """With which keys this terminal stops and kills what runs in it."""
    reported = subprocess.run(
        ["stty", "-a", "-F", shown.state("pane_tty")], capture_output=True, text=True, check=True
    )
    return {each for each in re.split(r"[;\n] ?", reported.stdout) if each[:4] in ("quit", "susp")}


def label(engine: Managed) -> str:
    return f"toy-{engine.pid}"


def row(screen: str, engine: Managed) -> str:
    table = screen.partition("TO \\ FROM")[0]
    return next((line for line in table.splitlines() if line.startswith(label(engine))), "")


def matrix_of(screen: str) -> str:
    return screen.partition("TO \\ FROM")[2].partition("FAULTS")[0]


def shm_bytes(text: str) -> float:
    """What the cells of a matrix, or the node line, say of copies by shm: bytes a second."""
    return sum(
        float(n) * 1000 ** " kMGT".index(unit or " ") for n, unit in RATE.findall(text)
    )  # fmt: skip


def test_what_it_prints_is_what_the_tables_say(busy: Busy) -> None:
    before = busy.bytes_copied
    done = subprocess.run(command(busy.node, "--once", "--json"), capture_output=True, text=True)
    after = busy.bytes_copied
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    view = json.loads(done.stdout)
    copied = view["node"]["bytes_per_second"]["shm"]
    assert 0 < copied * view["seconds"] <= after - before
    shown = {engine["engine"]: engine for engine in view["engines"]}
    assert {name: engine["pid"] for name, engine in shown.items()} == {
        label(engine): engine.pid for engine in busy.engines
    }
    assert {engine["state"] for engine in shown.values()} == {"healthy"}
    assert {pair["path"] for pair in view["copies"]} == {"shm"}
    for direction in ("in", "out"):
        rates = [engine[f"{direction}_bytes_per_second"] for engine in view["engines"]]
        assert sum(rates) == pytest.approx(copied)


def test_it_ends_quietly_when_no_one_reads_on(busy: Busy) -> None:
    argv = command(busy.node, "--interval", "0.1")
    with subprocess.Popen(argv, stdout=PIPE, stderr=PIPE, text=True) as piped:
        first = piped.stdout.readline()
        piped.stdout.close()  # as head does
        assert piped.wait() == 128 + signal.SIGPIPE
        assert piped.stderr.read() == ""
    assert first.startswith(" kvshm top ")
    assert "\x1b" not in first


def test_it_shows_the_node_and_its_dead_in_any_size(busy: Busy) -> None:
    *_, killed, other, stopped = busy.engines
    with terminal(in_shell(busy.node), *NARROW) as shown:
        shown.wait_for(lambda s: "engines 8/8" in s, "a first frame")
        assert keys_of(shown) == {"quit = <undef>", "susp = <undef>"}, "the shell would go on in it"
        ends_by(shown, "C-c")
        assert keys_of(shown) == {"quit = ^\\", "susp = ^Z"}
    with terminal(["env", "TERM=dumb", *in_shell(busy.node)], 200, 200) as shown:  # a frame scrolls
        shown.wait_for(lambda s: "engines 8/8" in s, "a frame without an alternate screen")
        assert shown.state("alternate_on") == "0"
    with terminal(in_shell(busy.node, stdin="<&-"), *NARROW) as shown:
        shown.wait_for(lambda s: "engines 8/8" in s, "a frame without a keyboard")
        ends_by(shown, "C-c")
    stopped.signal(signal.SIGSTOP)
    with terminal(in_shell(busy.node, "--interval", "0.2"), *WIDE) as shown:
        screen = shown.wait_for(
            lambda s: "engines 7/8" in s and shm_bytes(matrix_of(s)), "copies are seen"
        )
        assert "coordinator ok" in screen
        assert all(row(screen, engine) for engine in busy.engines), screen
        assert " healthy " in row(screen, busy.engines[0])
        assert row(screen, busy.engines[0]).endswith(" toy")  # the model
        assert "down: it does not answer" in screen
        assert all(label(engine) in matrix_of(screen) for engine in busy.engines[:5])
        assert 0 < shm_bytes(matrix_of(screen)) < 100e9

        killed.kill()
        other.kill()
        ended = "down: its process has"
        shown.wait_for(
            lambda s: "engines 5/8" in s and all(ended in row(s, e) for e in (killed, other)),
            "the dead are seen",
        )
        look_small_and_large(shown, busy.engines)

        busy.coordinator.kill()
        fault = "no coordinator runs: engines hear of no new engine"
        screen = shown.wait_for(
            lambda s: "coordinator no coordinator runs" in s and fault in s, "it is missed"
        )
        assert all(" healthy " in row(screen, engine) for engine in busy.engines[:5]), screen
        ends_by(shown, "q")


def is_whole(screen: str) -> bool:
    return screen.startswith(" kvshm top") and "q ends" in screen


def look_small_and_large(shown: Terminal, engines: list[Managed]) -> None:
    shown.resize(*NARROW)
    screen = shown.wait_for(lambda s: is_whole(s) and "MODEL" not in s, "a narrow frame")
    lines = screen.splitlines()
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert all(row(screen, engine) for engine in engines[5:]), screen  # those that are not well
    head = next(line for line in lines if line.startswith("ENGINE"))
    assert head.split()[:2] == ["ENGINE", "STATE"]
    assert "TO \\ FROM" in screen
    assert "shm" in screen.partition("TO \\ FROM")[2]
    shown.resize(*WIDE)
    screen = shown.wait_for(lambda s: is_whole(s) and "MODEL" in s, "a wide frame")
    assert all(row(screen, engine) for engine in engines)


def ends_by(shown: Terminal, key: str) -> None:
    """A key ends it, and the terminal is as it was."""
    assert shown.state("alternate_on") == "1"
    shown.type(key)
    screen = shown.wait_for(lambda s: "ended with" in s, "its end")
    assert screen.strip() == "ended with 0"
    assert shown.state("alternate_on") == "0"
    assert shown.state("cursor_flag") == "1"
