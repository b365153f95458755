"""A rank whose load thread has ended or hangs, which nothing is known to bring about."""

from __future__ import annotations

import threading

import pytest

from kvshm._rank.rank_half import RankHalf
from kvshm._rank.rank_load import RankLoad

from ..waiting import until
from .exporters import Make
from .test_rank import cache, load_of, opened, own, piece_of, reports, transport

__all__ = ["cache", "opened", "own", "transport"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is to die
def test_a_load_that_a_dead_load_thread_has_left_ends_when_it_is_cancelled(
    opened: RankHalf, exporter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request would wait for ever."""
    peer, begins_round = exporter(), threading.Event()
    go_round = opened._go_round

    def dies(active: list[RankLoad]) -> list[RankLoad]:
        monkeypatch.setattr(opened, "_go_round", go_round)
        begins_round.set()
        while not any(isinstance(each, RankLoad) and each.take() for each in opened._arrived(1.0)):
            pass
        raise SystemExit

    monkeypatch.setattr(opened, "_go_round", dies)
    opened._wake()
    assert begins_round.wait(30)  # a round begun before would carry out the first load
    opened.begin_load(load_of(piece_of(peer, 4), name="left"))
    until(lambda: not opened._thread.is_alive())
    opened.begin_load(load_of(piece_of(peer, 6), name="queued"))
    assert opened.poll() == []
    # The other way round, the thread that is started for the one carries out the other.
    for name in ("queued", "left"):
        opened.cancel(name)
    found = reports(opened, 2)
    assert {name: set(report.bad) for name, report in found.items()} == {
        "left": {14},
        "queued": {16},
    }
    assert opened.poll() == []


def test_a_load_behind_a_copy_that_hangs_ends_when_it_is_cancelled(
    opened: RankHalf, exporter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, hangs, go_on = exporter(), threading.Event(), threading.Event()
    advance = RankLoad.advance

    def hanging(load: RankLoad) -> bool:
        if load.report.load_id == "hangs":
            hangs.set()
            go_on.wait(30)
        return advance(load)

    monkeypatch.setattr(RankLoad, "advance", hanging)
    opened.begin_load(load_of(piece_of(peer, 3), name="hangs"))
    assert hangs.wait(30)
    opened.begin_load(load_of(piece_of(peer, 5), name="behind"))
    opened.cancel("hangs")
    opened.cancel("behind")
    assert {name: set(report.bad) for name, report in reports(opened, 1).items()} == {
        "behind": {15}
    }
    assert not opened.carries_out("behind")
    assert opened.carries_out("hangs")
    go_on.set()
    assert set(reports(opened, 1)) == {"hangs"}
    opened.cancel("behind")
    assert opened.poll() == []
