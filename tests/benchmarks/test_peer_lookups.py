"""Lookups in turns: all are asked the same number of questions, and an answer that is wrong ends
the run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import bench_peer_lookups
import pytest
from bench_lookup import digest
from bench_peer_lookups import (
    BURST,
    ENGINES,
    NOBODYS,
    Dict,
    Kvshm,
    chains,
    in_turns,
    questions,
    turns,
)


class Played:
    """A cache that holds some blocks."""

    def __init__(self, held: set[int]) -> None:
        self.held, self.asked_of, self.given_back = held, list[list[int]](), 0

    def question(self, chain: Sequence[int]) -> list[int]:
        return list(chain)

    def store(self, chain: Sequence[int]) -> None:
        self.held.update(chain)

    def ask(self, question: list[int]) -> int:
        self.asked_of.append(question)
        return next((n for n, one in enumerate(question) if one not in self.held), len(question))

    def asked(self, question: list[int]) -> None:
        self.given_back += 1


DRAWN = chains(20, 8000, random.Random(1), 7)


def test_a_chain_lies_in_one_engine() -> None:
    assert len(DRAWN) == 7
    for chain in [*DRAWN, *chains(900, 8000, random.Random(2), 7)]:
        assert chain == [*range(chain[0], chain[0] + len(chain))]
        assert chain[0] // (8000 // ENGINES) == chain[-1] // (8000 // ENGINES)
    assert len({chain[0] for chain in DRAWN}) == 7


@pytest.mark.parametrize("hit", [True, False])
def test_all_are_asked_as_often_and_give_back_what_they_took(hit: bool) -> None:
    clients = {name: Played(set(range(8000))) for name in "ab"}
    asked = {name: questions(client, DRAWN, hit) for name, client in clients.items()}
    found = in_turns(clients, asked, 3)
    for name, client in clients.items():
        assert found[name]["n"] == 3 * BURST
        assert len(client.asked_of) == client.given_back == 3 * (BURST + 1)
        assert {one.found for one in asked[name]} == {20 if hit else 0}
    assert clients["a"].asked_of == clients["b"].asked_of


@pytest.mark.parametrize(("hit", "held"), [(True, {*range(4000)}), (False, {NOBODYS})])
def test_a_wrong_answer_ends_the_run(hit: bool, held: set[int]) -> None:
    clients = {"good": Played(set(range(8000))), "bad": Played(held)}
    asked = {name: questions(client, DRAWN, hit) for name, client in clients.items()}
    with pytest.raises(SystemExit, match="bad has found"):
        in_turns(clients, asked, 3)


def test_a_dict_finds_what_is_there_up_to_a_hole() -> None:
    places = Dict(800, 100)
    assert places.ask(places.question(range(250, 290))) == 40
    assert places.ask(places.question([250, 251, 900, 252])) == 2
    assert isinstance(places, Kvshm)
    hashes = places.question([250])
    assert hashes == [digest("2 50")]


def test_long_chains_are_asked_less_often() -> None:
    assert turns(64) > turns(512) > turns(4096) >= 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mooncake", "nowhere"], "--mooncake nowhere: mooncake is not installed there"),
        (["--keys", "64", "200"], "--keys: a chain has from 1 to 100 blocks"),
        (["--keys", "0"], "--keys: a chain has from 1 to 100 blocks"),
    ],
    ids=str,
)
def test_what_would_fail_after_minutes_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    said: str,
) -> None:
    usual = ["--entries", "800"]
    for name in ("lmcache", "mooncake"):
        (tmp_path / name / name).mkdir(parents=True)
        usual += [f"--{name}", str(tmp_path / name)]
    monkeypatch.setattr("sys.argv", ["bench_peer_lookups.py", *usual, *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_peer_lookups.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
