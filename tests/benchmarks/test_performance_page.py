"""docs/performance.md, its plots and README's part of it are what docs/performance_page.py makes of
the results, and no number in them was typed by hand."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import performance_page
import pytest
from performance_page import PAGE, PLOTS, PROSE, README, Made, in_readme, made, read
from performance_plots import COLOURS, INK, PAPER, Curves, Dots, Plot, Row, draw
from performance_view import View, number
from performance_views import VIEWS
from suite import BENCHES

TEXT = tomllib.loads(PROSE.read_text("utf-8"))
RESULTS = read()
LETTER_POINTS = 5.0
"""At least, on the average."""
LEAST_PIXELS, PHONE_PIXELS, MARGINS = 9.0, 390, 32


@pytest.fixture(scope="module")
def found() -> Made:
    return made(RESULTS, TEXT)


def test_the_committed_page_is_the_generated_one(found: Made) -> None:
    assert PAGE.read_text("utf-8") == found.page, "make docs"
    readme = README.read_text("utf-8")
    assert in_readme(readme, found.readme) == readme, "make docs"


def test_the_committed_plots_are_the_generated_ones(found: Made) -> None:
    assert sorted(path.name for path in PLOTS.iterdir()) == sorted(f"{p}.svg" for p in found.plots)
    for name, plot in found.plots.items():
        assert (PLOTS / f"{name}.svg").read_text("utf-8") == draw(plot), f"{name}: make docs"
        assert f"](performance/{name}.svg)" in found.page


def test_a_target_is_missed_for_a_reason(found: Made) -> None:
    assert "| met |" in found.page
    assert not re.findall(r".*\*\*missed\*\* \|", found.page)


def texts() -> Iterator[str]:
    yield TEXT["head"]
    for one in (*TEXT["lead"], *TEXT["section"]):
        yield one["text"]
        yield one.get("question", "")


def test_no_number_was_typed_by_hand() -> None:
    """But for names of percentiles and of intervals."""
    typed = []
    for text in texts():
        prose = re.sub(r"\{.*?\}|`.*?`|\]\(.*?\)|\bp\d\d\b|\b95 %", "", text, flags=re.DOTALL)
        typed += re.findall(r".*\d.*", prose)
    assert not typed


def test_every_benchmark_has_its_section_and_every_section_its_benchmark() -> None:
    names = {bench.name for bench in BENCHES}
    sections = [section["results"] for section in TEXT["section"]]
    assert sorted(sections) == sorted({*sections}) == sorted(VIEWS)
    assert names == {*sections}


def test_a_section_is_there_if_its_results_are(found: Made) -> None:
    titles = {section["results"]: f"\n## {section['title']}\n" for section in TEXT["section"]}
    assert {name for name, title in titles.items() if title in found.page} == {*RESULTS}
    fewer = made({name: of for name, of in RESULTS.items() if name != "groups"}, TEXT)
    assert titles["groups"] in found.page
    assert titles["groups"] not in fewer.page
    nothing = made({}, TEXT)
    assert (nothing.plots, nothing.readme) == ({}, "\n")


def test_a_run_that_failed_is_shown_as_failed(found: Made) -> None:
    last = RESULTS["load"][-1]
    failed = {"failed_run": {"reason": "status 1", "stderr": ["it", "broke"]}}
    line = {k: last[k] for k in ("machine", "versions", "commit", "command")} | failed
    page = made({**RESULTS, "load": [*RESULTS["load"], line]}, TEXT).page
    _, shown = page.split("\n## Under load\n")
    assert "**This run has failed**: status 1.\n\n```text\nit\nbroke\n```" in shown
    assert "load.svg" not in page
    assert "load.svg" in found.page


def test_a_target_is_met_or_missed_with_its_reason() -> None:
    values = {"line": {"a": {"p50": 2.0}}}
    wanted: list[dict[str, Any]] = [
        {"what": "x", sign: limit, "unit": "ms", "of": ["line", "a", "p50"], "missed": "that is so"}
        for sign, limit in (("at_most", 2), ("at_most", 1.9), ("at_least", 2), ("at_least", 3))
    ]
    (table,) = performance_page.targets(wanted, View((), []), values)
    assert [row.rpartition(" | ")[2] for row in table.splitlines()[2:]] == [
        "met |", "**missed**: that is so |", "met |", "**missed**: that is so |",
    ]  # fmt: skip
    assert "| x | ≤ 1.9 ms | 2.00 ms |" in table


def test_prose_that_asks_for_what_is_not_there_is_no_page() -> None:
    section = {"results": "groups", "title": "", "question": "", "text": "{line[nothing]}"}
    with pytest.raises(KeyError, match="nothing"):
        made(RESULTS, {**TEXT, "section": [section]})


def without(arm: str) -> dict[str, Any]:
    """The results of a load test as they are if an arm fails at all rates."""
    last = RESULTS["load"][-1]
    rates = {r: {**arms, arm: {"errors": ["it ended"]}} for r, arms in last["rates"].items()}
    return {**RESULTS, "load": [*RESULTS["load"][:-1], {**last, "rates": rates}]}


@pytest.mark.parametrize("arm", ["lmcache-least", "kvshm-least", "plain-affinity", "plain-rr"])
def test_an_arm_that_failed_is_shown_and_not_spoken_of(arm: str) -> None:
    found = made(without(arm), TEXT)
    assert "failed: it ended |" in found.page
    assert "Under load, with room for" not in found.readme
    assert "A prompt of" in found.readme


def first_tokens(arms: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
    last = RESULTS["import-peers"][-1]
    pays = dict.fromkeys(arms)
    return {"import-peers": [{**last, "arms": arms, "failed": failed, "pays_from_tokens": pays}]}


def test_first_tokens_of_others_are_none_of_kvshm() -> None:
    arms = {**RESULTS["import-peers"][-1]["arms"], "kvshm": {"rounds_left_out": 15}}
    arms = {"kvshm": arms.pop("kvshm"), **arms}
    page = made(first_tokens(arms, {"kvshm": "it broke off"}), {**TEXT, "lead": []}).page
    assert "| kvshm: failed: it broke off |" in page
    assert "| LMCache: imported |" in page
    assert "times | none | **missed**: none was measured |" in page
    nothing = {arm: {"rounds_left_out": 15} for arm in arms}
    page = made(first_tokens(nothing, {}), {**TEXT, "lead": []}).page
    assert "| LMCache: failed: no round counts |" in page


def test_numbers_have_the_digits_that_count() -> None:
    values = (0, 0.0123, 1.5, 12.04, 99.96, 100.4, 7774.2, -2.6)
    assert [number(value) for value in values] == [
        "0", "0.0123", "1.50", "12.0", "100.", "100", "7,774", "-2.60",
    ]  # fmt: skip


# -- plots

DOTS = Dots("Title", "ms", [Row("ours", {"p50": 1, "p99": 90}), Row("theirs", {"p50": 2}, False)])
CURVES = Curves("Title", "x", "y", {"a": [(1, 2), (1000, 4)], "b": [(1, 3), (1000, 5)]}, log=True)


@pytest.mark.parametrize("plot", [DOTS, CURVES], ids=["dots", "curves"])
def test_a_plot_is_the_same_bytes_again_and_says_nothing_of_when(plot: Plot) -> None:
    drawn = draw(plot)
    assert drawn == draw(plot)
    assert "<title>Title</title>" in drawn
    assert "<dc:date>" not in drawn
    assert "matplotlib v" not in drawn.lower()


@pytest.mark.parametrize("plot", [DOTS, CURVES], ids=["dots", "curves"])
def test_a_plot_can_be_read_on_a_phone(plot: Plot) -> None:
    """Text is text, and large enough where the picture is made as narrow as a phone."""
    drawn = draw(plot)
    (points,) = re.findall(r'<svg [^>]*width="([\d.]+)pt"', drawn)
    scale = min(1.0, (PHONE_PIXELS - MARGINS) / (float(points) / 0.75))
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", drawn)]
    assert len(sizes) > 8
    assert min(sizes) / 0.75 * scale >= LEAST_PIXELS


def test_long_names_of_series_are_not_cut_off() -> None:
    names = [f"vLLM's offloading, CPU copies, {n}, prefix affinity" for n in range(6)]
    drawn = draw(CURVES._replace(series={name: [(1, 2), (1000, 4)] for name in names}))
    (width,) = re.findall(r'<svg [^>]*width="([\d.]+)pt"', drawn)
    found = re.findall(r'<text [^>]* x="(-?[\d.]+)"[^>]*>([^<]*affinity)<', drawn)
    assert [name for _, name in found] == names
    for left, name in found:
        assert 0 < float(left) < float(width) - LETTER_POINTS * len(name)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_plot_brings_its_own_paper_and_differs_by_more_than_colours() -> None:
    drawn = draw(DOTS)
    assert re.search(rf'<g id="patch_1">\s*<path [^>]*style="fill: {PAPER}"', drawn)
    contrast = (luminance(PAPER) + 0.05) / (luminance(INK) + 0.05)
    assert contrast >= 7
    for colour in COLOURS[:2]:  # of dots
        assert (luminance(PAPER) + 0.05) / (luminance(colour) + 0.05) >= 3
    ours, theirs = (re.search(rf"style=\"([^\"]*)\"[^>]*>{x}<", drawn) for x in ("ours", "theirs"))
    assert ours is not None
    assert theirs is not None
    assert ["font-weight: 700" in each[1] for each in (ours, theirs)] == [True, False]
