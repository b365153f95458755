"""First tokens: only rounds count in which every prompt came from where it should; what pays from
which length on; and an arm that fails is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_import
import pytest
import tiny_model
from bench_import import TAIL_TOKENS, WARM_UP, ask, main, of_length, pays_from, results, tails
from bench_import import Prompts as NewPrompts
from load_arms import Arm
from local_node import PromptTokens
from sharing_node import BLOCK_SIZE

ROUND = {"imported": 30.0, "local_hit": 20.0, "computed": 90.0}


def measured(*rounds: dict[str, float | None], tokens: int = 128) -> dict[int, Any]:
    return {tokens: list(rounds)}


def test_a_round_in_which_a_prompt_came_from_elsewhere_is_left_out() -> None:
    elsewhere = {**ROUND, "imported": None}
    starts = [
        {"kvshm": measured(ROUND, elsewhere, ROUND), "lmcache": measured(ROUND, ROUND, elsewhere)},
        {"kvshm": measured(ROUND, ROUND, ROUND)},
    ]
    found = results(starts, ["kvshm", "lmcache", "offload"], [128])
    assert found["arms"].keys() == {"kvshm", "lmcache"}
    kvshm = found["arms"]["kvshm"]
    assert kvshm["rounds_left_out"] == 1
    assert kvshm["imported_ms"]["p50"] == 30.0
    assert kvshm["imported_over_local_hit"] == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert kvshm["imported_over_computed"]["median"] == 0.333
    assert found["imported"] == {"kvshm_over_lmcache": {}}, "one round, and none with both"


def test_arms_are_compared_round_by_round() -> None:
    fast, slow = ({**ROUND, "imported": ms} for ms in (10.0, 40.0))
    starts = [{"kvshm": measured(fast, slow, fast), "lmcache": measured(slow, slow, slow)}]
    found = results(starts, ["kvshm", "lmcache"], [128])["imported"]["kvshm_over_lmcache"]
    assert (found["median"], found["high"]) == (0.25, 1.0)


def test_without_two_rounds_nothing_is_said() -> None:
    assert of_length([[ROUND], []], 4) == {"rounds_left_out": 4}


def test_tails_are_compared_with_tails() -> None:
    pairs = [(10.0, 10.0)] * 50 + [(30.0, 10.0)] + [(10.0, 20.0)]
    found = tails(pairs)
    assert found["low"] < found["ratio"] < found["high"]
    assert found["ratio"] == pytest.approx((10 + 20 * 0.49) / (10 + 10 * 0.49), abs=0.001)


@pytest.mark.parametrize(
    ("highs", "pays"),
    [
        ({128: 0.9, 256: 0.8, 512: 0.5}, 128),
        ({128: 1.2, 256: 0.8, 512: 0.5}, 256),
        ({128: 0.9, 256: 1.0, 512: 0.5}, 512),
        ({128: 0.9, 256: 0.9, 512: 1.1}, None),
        ({128: 0.9, 256: None, 512: 0.9}, 512),
    ],
    ids=str,
)
def test_importing_pays_from_where_it_is_faster_at_every_greater_length(
    highs: dict[int, float | None], pays: int | None
) -> None:
    found = {
        tokens: {"imported_over_computed": {"high": high}} if high else {}
        for tokens, high in highs.items()
    }
    assert pays_from(found) == pays


class PlayedEngine:
    """Says where its prompts' prefixes come from: what it has seen is a local hit, what its peer
    has seen is imported."""

    def __init__(self, log: list[tuple[str, str]], name: str) -> None:
        self._log, self._name, self._seen = log, name, set[tuple[int, ...]]()
        self.peer: PlayedEngine | None = None
        self._tokens = PromptTokens(0, 0, 0)

    def complete(self, prompt: list[int], max_tokens: int) -> Any:
        asked, whole = tuple(prompt), len(prompt)
        prefix = whole - TAIL_TOKENS
        if asked in self._seen:
            used, source = (whole - prefix, prefix, 0), "local_hit"
        elif self.peer and asked in self.peer._seen:
            used, source = (whole - prefix, 0, prefix), "imported"
        else:
            used, source = (whole, 0, 0), "computed"
        self._tokens = PromptTokens(*map(sum, zip(vars(self._tokens).values(), used, strict=True)))
        self._seen.add(asked)
        self._log.append((self._name, source))
        return SimpleNamespace(ttft_s={"local_hit": 0.02, "imported": 0.03}.get(source, 0.09))

    def prompt_tokens(self) -> PromptTokens:
        return self._tokens


def played() -> tuple[list[tuple[str, str]], Arm]:
    log: list[tuple[str, str]] = []
    first, second = PlayedEngine(log, "first"), PlayedEngine(log, "second")
    second.peer = first

    @contextmanager
    def sharing(exporter: Any, blocks: int) -> Iterator[None]:
        assert (exporter, blocks) == (first, 2)
        yield
        log.append(("node", "shared"))

    node: Any = SimpleNamespace(sharing=sharing)
    return log, Arm(node, [first, second], None)


LOADED = [
    ("first", "computed"),
    ("node", "shared"),
    ("second", "imported"),
    ("first", "computed"),
    ("second", "local_hit"),
]
COMPUTED = [("first", "computed"), ("second", "computed")]


def test_the_size_of_a_block_is_that_of_the_model() -> None:
    size = tiny_model.SIZES | bench_import.SIZES
    heads = size["num_key_value_heads"] * size["head_dim"]
    keys_and_values, bytes_each = 2, 2
    block = size["num_hidden_layers"] * keys_and_values * heads * bytes_each * BLOCK_SIZE
    assert block == bench_import.BYTES_PER_BLOCK


def test_a_model_of_another_size_is_written_anew(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def layers(**sizes: int) -> int:
        tiny_model.write_model(tmp_path, 0, **sizes)
        return int(json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"])

    assert [layers(num_hidden_layers=1), layers(num_hidden_layers=2), layers()] == [1, 2, 4]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_import, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(bench_import, "ASLEEP_SECONDS", 0)


@pytest.mark.parametrize("computed_first", [False, True])
def test_before_each_way_the_other_engine_computes(computed_first: bool) -> None:
    log, arm = played()
    times = ask("kvshm", arm, 256, NewPrompts(1), computed_first)
    assert times == ROUND
    assert log == (COMPUTED + LOADED if computed_first else LOADED + COMPUTED)


def test_what_comes_from_elsewhere_has_no_time() -> None:
    _, arm = played()
    second: Any = arm.engines[1]
    second.peer = None  # so nothing is imported
    assert ask("kvshm", arm, 256, NewPrompts(1), False) == {**ROUND, "imported": None}


def test_all_is_printed_and_an_arm_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    @contextmanager
    def started(kind: Any, setting: Any) -> Iterator[Any]:
        if kind.offloads:
            raise RuntimeError("log\nException: no GPU")
        yield SimpleNamespace(engines=[], kind=kind)

    def played(kind: str, arm: Any, tokens: int, *_: Any) -> dict[str, float]:
        if kind == "offload+copies" and len(asked) > 8:
            raise ConnectionRefusedError("gone")
        asked.append((kind, tokens))
        return ROUND

    monkeypatch.setattr(bench_import, "started", started)
    monkeypatch.setattr(bench_import, "ask", played)
    monkeypatch.setattr(bench_import, "write_model", lambda path, **_: path)
    options = ["--arms", "kvshm,offload,offload+copies", "--rounds", "3", "--lengths", "128,512"]
    monkeypatch.setattr("sys.argv", ["bench_import.py", *options])
    main()
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == {"offload": "Exception: no GPU", "offload+copies": "gone"}
    assert found["arms"]["kvshm"]["imported_over_local_hit_p99"]["ratio"] == 1.5
    assert found["lengths"]["kvshm"].keys() == {"128", "512"}
    assert found["pays_from_tokens"] == {"kvshm": 128}
    assert [tokens for kind, tokens in asked if kind == "kvshm"] == [3456] * WARM_UP + 3 * [
        128, 512, 3456,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arms", "kvshm,plain"], "--arms plain: nothing that loads a prefix"),
        (["--arms", "kvshm,nixl"], "--arms nixl: nothing that loads a prefix"),
        (["--arms", "lmcache"], "LMCache needs --lmcache FOLDER"),
        (["--rounds", "1"], "--rounds: below 2"),
        (["--lengths", "100,256"], "a prefix of 100 tokens: not whole blocks of 128"),
        (["--tokens", "1024"], "--lengths: not all are below --tokens 1024"),
    ],
    ids=str,
)
def test_what_would_fail_after_minutes_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_import.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
