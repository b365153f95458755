"""Frames of ``kvshm top``: they fit any terminal, show what is slow, and obey no other's text."""

from __future__ import annotations

import builtins
import io
import re
import sys
from collections.abc import Sequence

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvshm._base.copy_path import CopyPath
from kvshm._shm.error_log import LoggedError
from kvshm.tools import cli
from kvshm.tools.node.reading import Blocks, EngineReading
from kvshm.tools.output import clean
from kvshm.tools.top.frame import age, duration, frame, number, rate, ratio
from kvshm.tools.top.rates import measure
from kvshm.tools.top.screen import print_frame
from kvshm.tools.top.view import View, build_view

from .looks import START_NS, copied, engine, node
from .served import ServedNode

EVIL = "a\x1b[2J\x1b]0;owned\x07[bold red]b[/]\r\n\u202ec\x9b31m[link=file:///]d"
HARMLESS = "a?[2J?]0;owned?[bold red]b[/]???c?31m[link=file:///]d"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def view_of(*engines: EngineReading) -> View:
    now = node(*engines, at=1.0)
    idle = node(*(engine(e.epoch, namespace=e.namespace) for e in engines))
    return build_view(now, measure(idle, now), measure(None, now), measure(None, now))


def many(number: int, keepers: int = 0) -> list[EngineReading]:
    return [
        engine(
            one,
            keeps=one > number - keepers,
            owner_died=one == 2,
            traffic=[copied(other, 900 << 20) for other in range(1, number + 1) if other != one],
            errors=tuple(LoggedError(1, START_NS, START_NS, f"e{one}{n}") for n in range(3)),
        )
        for one in range(1, number + 1)
    ]


def lines(view: View, width: int = 200, height: int | None = 50) -> list[str]:
    return [line.plain for line in frame(view, width, height)]


def head_of(shown: Sequence[str], first: str = "ENGINE") -> list[str]:
    return re.split(r"\s{2,}", next(line for line in shown if line.startswith(first)).strip())


def test_a_frame_fits_any_terminal(subtests: pytest.Subtests) -> None:
    """And shows as many engines as there is room for, first those that are not well."""
    for size in [(80, 24), (200, 50), (120, 12), (40, 24), (20, 10), (20, 5), (1, 1)]:
        for engines, keepers in [(1, 0), (2, 0), (8, 0), (28, 0), (1, 1), (8, 2), (28, 8)]:
            with subtests.test(size=size, engines=engines, keepers=keepers):
                width, height = size
                shown = lines(view_of(*many(engines, keepers)), width, height)
                assert len(shown) <= height
                assert max(map(cell_len, shown)) <= width
                if width >= 80 and engines > 1:
                    assert any(line.startswith("dp2 ") and "down" in line for line in shown)
                if width >= 80 and height >= 24 and engines > 1:
                    assert any("TO \\ FROM" in line for line in shown)
                    assert any("dp2: its process has ended" in line for line in shown)
                    assert any(line.startswith("KEEPER ") for line in shown) == bool(keepers)


def test_all_engines_are_shown_where_they_fit() -> None:
    shown = lines(view_of(*many(8)))
    assert all(sum(line.startswith(f"dp{n} ") for line in shown) == 2 for n in range(1, 9))
    assert not any("more" in line for line in shown if not line.startswith("  "))


def test_narrow_terminals_lose_the_least_important_columns() -> None:
    wide = head_of(lines(view_of(*many(3)), 200))
    assert wide == [
        "ENGINE", "STATE", "PUB", "DUP", "LAST", "DUP/s", "LAST/s", "HIT%", "PEER%", "IN", "OUT",
        "LEASED", "DRAIN p99", "HOOK", "HOOK p99", "MODEL",
    ]  # fmt: skip
    for width in range(200, 30, -7):
        narrow = head_of(lines(view_of(*many(3)), width))
        assert narrow[:2] == ["ENGINE", "STATE"]
        assert [head for head in wide if head in narrow] == narrow
    assert {"PUB", "IN", "OUT"} <= {*head_of(lines(view_of(*many(3)), 80))}


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_keepers_and_engines_in_drain_are_marked_where_others_are_healthy() -> None:
    """Within 100 columns, in which no column gives way for it that was there before."""
    keeper = engine(
        3, keeps=True, blocks=Blocks(100, ready=90, last_copies=60),
        counters={"evicted": 2, "evicted_us": 3000 * 10**6}, traffic=[copied(1, 40 << 20)],
    )  # fmt: skip
    draining = engine(1, in_drain=True, traffic=[copied(3, 20 << 20)])
    shown = lines(view_of(draining, engine(2), keeper), 100)
    head = head_of(shown)
    assert {"DUP", "LAST", "LEASED", "DRAIN p99", "HOOK", "HOOK p99"} <= {*head}
    at = next(n for n, line in enumerate(shown) if line.startswith("ENGINE"))
    rows = [dict(zip(head, cells(line), strict=True)) for line in shown[at + 1 : at + 4]]
    assert [row["STATE"] for row in rows] == ["in drain", "healthy", "keeper"]
    assert [row["DUP"] for row in rows] == ["20", "20", "30"]
    at = next(n for n, line in enumerate(shown) if line.startswith("KEEPER"))
    assert [cells(line) for line in shown[at : at + 3]] == [
        ["KEEPER", "FULL%", "IN", "OUT", "OUT/IN", "DROPS AFTER", "MODEL"],
        ["dp3", "90.0", "42 MB/s", "21 MB/s", "0.50", "25 min", "m"],
        [""],
    ]


def test_of_what_is_not_well_the_state_comes_before_the_mark() -> None:
    dead = engine(1, in_drain=True, owner_died=True)
    shown = lines(view_of(dead, engine(2, keeps=True, joined=False)))
    assert any("down, in drain: its process has ended" in line for line in shown)
    assert any("degraded, keeper: it is not in the coordinator's roster" in line for line in shown)


def test_the_node_line_says_what_is_reused() -> None:
    counters = {"duplicates_reused": 1200, "last_copies_reused": 3}
    shown = lines(view_of(engine(1, counters=counters), engine(2)))
    assert any("reused duplicates 1.2k/s, last copies 3/s" in line for line in shown)
    wide = dict(zip(head_of(shown), cells(next(s for s in shown if s[:3] == "dp1")), strict=True))
    assert (wide["DUP/s"], wide["LAST/s"]) == ("1.2k", "3")


def test_pairs_that_do_not_fit_the_matrix_are_summed() -> None:
    shown = lines(view_of(*many(28)), 80, 24)
    begin = next(n for n, line in enumerate(shown) if line.startswith("TO"))
    assert shown[begin].split()[-1] == "others"
    assert "GB/s nvlink" in shown[begin + 1]


def test_a_slow_path_is_marked_and_named() -> None:
    slow = engine(1, traffic=[copied(2, 50 << 20, CopyPath.STAGED), copied(3, 90 << 20)])
    shown = frame(view_of(slow, engine(2), engine(3)), 100, 24)
    (cell,) = [line for line in shown if line.plain.startswith("dp1") and "staged!" in line.plain]
    assert "nvlink " in f"{cell.plain} "
    assert any(cell.plain[s.start : s.end].strip() == "52 MB/s staged!" for s in cell.spans)
    assert any("dp1: copies from dp2: staged: through host memory" in s.plain for s in shown)


def test_a_slow_pair_gets_a_column_before_faster_ones() -> None:
    engines = many(28)
    slow = engine(20, traffic=[copied(27, 1, CopyPath.STAGED)])
    shown = lines(view_of(*engines[:19], slow, *engines[20:]), 80, 24)
    assert "dp27" in head_of(shown, "TO")
    assert any("staged!" in line and line.startswith("dp20") for line in shown)


def test_texts_of_other_processes_are_harmless() -> None:
    """Names, models and errors come from memory that other processes write."""
    assert clean(EVIL) == HARMLESS
    bad = engine(
        1, namespace=EVIL, label=EVIL, name=EVIL, model=EVIL, traffic=[copied(9, 5, peer=EVIL)],
        errors=(LoggedError(1, START_NS, START_NS, EVIL),),
    )  # fmt: skip
    view = view_of(bad, engine(2))
    for width in (80, 400):
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, color_system=None, width=width)
        for line in frame(view, width, None):
            console.print(line, soft_wrap=True)
        assert not set(out.getvalue()) & {"\x07", "\r", "\u202e", "\x9b"}
        assert "\x1b[2J" not in out.getvalue()
        assert "\x1b]" not in out.getvalue()
    assert sum(HARMLESS in line for line in lines(view, 900, None)) >= 3
    assert "[bold red]b" in out.getvalue()


def test_colours_are_for_terminals_without_no_color(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_frame(view_of(*many(2)))
    assert "\x1b" not in capsys.readouterr().out
    for variable, coloured in (("ANY", True), ("NO_COLOR", False)):
        monkeypatch.setenv(variable, "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(sys, "stdout", Terminal())
        print_frame(view_of(*many(2)))
        assert ("\x1b[32m" in sys.stdout.getvalue()) is coloured


def test_numbers_are_short(subtests: pytest.Subtests) -> None:
    for value, text in [
        (None, "-"),
        (0, "0"),
        (999, "999"),
        (1000, "1.0k"),
        (61_234, "61k"),
        (999_600, "1.0M"),
    ]:
        with subtests.test(value=value, text=text):
            assert number(value) == text


def test_units() -> None:
    rates = [rate(v) for v in (None, 0, 999, 3.14e9, 71.6e6)]
    assert rates == ["-", "0 B/s", "999 B/s", "3.1 GB/s", "72 MB/s"]
    assert [duration(v) for v in (None, 0, 9, 41e3, 1.3e6, 12e9)] == [
        "-", "0", "9 ns", "41 us", "1.3 ms", "12 s",
    ]  # fmt: skip
    assert [age(v) for v in (None, 0, 59, 300, 7200, 172800)] == [
        "-", "0 s", "59 s", "5 min", "2 h", "2 d",
    ]  # fmt: skip
    assert [ratio(v) for v in (None, 0, 0.625, 9.994, 12.3)] == ["-", "0.00", "0.62", "9.99", "12"]


def test_without_rich_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: ServedNode
) -> None:
    """And --json works."""
    place = ["--run-dir", str(served.run_dir), "--namespace", served.namespace]
    imported = builtins.__import__

    def without_rich(name: str, *rest: object) -> object:
        if name.partition(".")[0] == "rich":
            raise ImportError(name, name=name)
        return imported(name, *rest)

    for module in [m for m in sys.modules if m.startswith("kvshm.tools.top.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert cli.main(["top", *place]) == 2
    assert "pip install 'kvshm[ops]'" in capsys.readouterr().err
    assert cli.main(["top", "--json", *place]) == 1
    assert capsys.readouterr() == ("", f"nothing of kvshm runs in {place[1]}\n")


@pytest.mark.parametrize("interval", ["0", "nan", "inf", "soon", "-1"])
def test_a_wrong_interval_is_a_usage_error(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", f"--interval={interval}"])
    assert ended.value.code == 2
    assert interval in capsys.readouterr().err
