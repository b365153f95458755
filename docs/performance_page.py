"""Write docs/performance.md, its plots in docs/performance/ and README's part of it.

    make docs

All of it follows from the results in benchmarks/results and the prose in docs/performance.toml:
no number is typed by hand.  A section whose results are not there is left out; a run that has
failed is shown as failed.  A test compares the committed files with the generated ones.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from performance_plots import Plot, draw
from performance_view import Line, Lines, View, number
from performance_views import VIEWS

DOCS = Path(__file__).parent
PAGE = DOCS / "performance.md"
PLOTS = DOCS / "performance"
PROSE = DOCS / "performance.toml"
README = DOCS.parent / "README.md"
RESULTS = DOCS.parent / "benchmarks" / "results"
BEGIN, END = "<!-- performance -->\n", "<!-- end of performance -->\n"
WIDTH = 140
COMMIT_DIGITS = 12
SIGNS = {"at_most": "≤", "at_least": "≥"}


class Made(NamedTuple):
    """What follows from the results."""

    page: str
    readme: str
    """The part of README.md."""
    plots: Mapping[str, Plot]
    """By the names of their files, without ``.svg``."""


def read(results: Path = RESULTS) -> dict[str, Lines]:
    """Return the lines of each benchmark's results that there are."""
    return {
        path.stem: [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for path in sorted(results.glob("*.jsonl"))
    }


def made(results: Mapping[str, Lines], prose: Mapping[str, Any]) -> Made:
    """Make everything.  Raises KeyError or IndexError if the prose asks for a value that the
    results do not have."""
    views = {
        name: VIEWS[name](lines)
        for name, lines in results.items()
        if lines and not has_failed(lines[-1])
    }
    values = {name: of_view(results[name], view) for name, view in views.items()}
    plots = {
        f"{name}{more and f'-{more}'}": plot
        for name, view in views.items()
        for more, plot in view.plots.items()
    }
    sections = [
        part
        for section in prose["section"]
        if results.get(section["results"])
        for part in shown(section, results[section["results"]], views, values)
    ]
    lead = list(leading(prose["lead"], views, values))
    first = prose["lead_plot"]
    readme = [*lead, *picture(first, plots, "docs/performance")] if first in plots else lead
    page = ["# Performance", *prose["head"].strip().split("\n\n"), *lead, *picture(first, plots)]
    return Made(joined([*page, *sections]), joined(readme), plots)


def has_failed(line: Line) -> bool:
    """Whether the run has, as benchmarks/suite.py says."""
    return "failed_run" in line


def of_view(lines: Lines, view: View) -> dict[str, Any]:
    return {"line": lines[-1], "lines": lines, **view.values}


def leading(
    sentences: Sequence[Mapping[str, Any]], views: Mapping[str, View], values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield, as one paragraph, the sentences all of whose results are there."""
    there = []
    for one in sentences:
        if all(name in values for name in one["results"]):
            with failures(*(views[name] for name in one["results"])):
                there.append(filled(one["text"], values))
    if there:
        yield " ".join(there)


@contextmanager
def failures(*views: View) -> Iterator[None]:
    """Where an arm has failed, leave out what would be said of it; else what is not there is a
    mistake in the prose."""
    try:
        yield
    except LookupError:
        if not any(view.failed for view in views):
            raise


def shown(
    section: Mapping[str, Any], lines: Lines, views: Mapping[str, View], values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the paragraphs of a section."""
    name, line = section["results"], lines[-1]
    yield f"## {section['title']}"
    yield section["question"].strip()
    if name in views:
        view = views[name]
        for more in view.plots:
            yield from picture(f"{name}{more and f'-{more}'}", view.plots, key=more)
        yield table([view.head, *view.rows])
        yield from targets(section.get("target", ()), view, values[name])
        with failures(view):
            yield from filled(section["text"], values[name]).split("\n\n")
    else:
        failed = line["failed_run"]
        yield f"**This run has failed**: {failed['reason']}."
        if failed["stderr"]:
            yield "\n".join(["```text", *failed["stderr"], "```"])
    yield origin(line)


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Put values in, such as ``{line[found_ms][p50]}``."""
    return text.strip().format(**{name: Value(value) for name, value in values.items()})


class Value:
    """A value in the prose: ``{a[b][0]}`` looks into it, and without a format a float is written
    with three digits."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, key: int | str) -> Value:
        return Value(self.value[key])

    def __format__(self, wanted: str) -> str:
        if isinstance(self.value, float) and not wanted:
            return number(self.value)
        return format(self.value, wanted)


def targets(
    wanted: Sequence[Mapping[str, Any]], view: View, values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a table of targets, each met or missed.  ``of``: where the values have what counts."""
    rows = []
    for target in wanted:
        (sign,) = SIGNS.keys() & target.keys()
        limit: float = target[sign]
        value: Any = None
        bound = f"{SIGNS[sign]} {limit:,.10g} {target['unit']}"
        with failures(view):
            value = functools.reduce(operator.getitem, target["of"], values)
        if value is None:
            rows.append((target["what"], bound, "none", "**missed**: none was measured"))
            continue
        met = value <= limit if sign == "at_most" else value >= limit
        why = f": {target['missed']}" if "missed" in target else ""
        said = "met" if met else f"**missed**{why}"
        rows.append((target["what"], bound, f"{number(value)} {target['unit']}", said))
    if rows:
        yield table([("target", "", "measured", ""), *rows])


def picture(
    name: str, plots: Mapping[str, Plot], folder: str = "performance", key: str | None = None
) -> Iterator[str]:
    """Yield the picture, if there is one."""
    if (plot := plots.get(name if key is None else key)) is not None:
        yield f"![{plot.title}]({folder}/{name}.svg)"


def table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def origin(line: Line) -> str:
    """Say how, where and with what a result was measured."""
    machine, versions = line["machine"], dict(line["versions"]) | dict(line.get("peers", {}))
    command = re.sub(r"^python\S* ", "", line["command"])
    with_what = ", ".join(f"{name} {version}" for name, version in versions.items())
    commit, dirty, _ = line["commit"].partition("-dirty")
    at = f"commit {commit[:COMMIT_DIGITS]}{' with changes' if dirty else ''}" if commit else ""
    cpu = ", ".join(filter(None, (machine["cpu"], machine.get("vectors"))))
    where = f"{machine['cores']} cores, {cpu}, Linux {machine['kernel']}"
    parts = [
        where,
        f"load {machine['load']}" if "load" in machine else "",
        with_what,
        at,
        line.get("note", ""),
    ]
    told = "; ".join(part for part in parts if part)
    return f"`PYTHONPATH=examples:. .venv/bin/python {command}`<br>\n{told}."


def joined(paragraphs: Sequence[str]) -> str:
    return "\n\n".join(map(wrapped, paragraphs)) + "\n"


def wrapped(paragraph: str) -> str:
    """Break the lines of prose; tables, headings, code and pictures stay as they are."""
    if paragraph.startswith(("|", "#", "```", "!", "`PYTHONPATH")):
        return paragraph
    return textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


def in_readme(readme: str, part: str) -> str:
    """Return README.md with another part.  Raises ValueError if it has not exactly one."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + part + END + after


def write() -> None:
    found = made(read(), tomllib.loads(PROSE.read_text("utf-8")))
    PAGE.write_text(found.page, "utf-8")
    README.write_text(in_readme(README.read_text("utf-8"), found.readme), "utf-8")
    PLOTS.mkdir(exist_ok=True)
    for path in PLOTS.glob("*.svg"):
        if path.stem not in found.plots:
            path.unlink()
    for name, plot in found.plots.items():
        (PLOTS / f"{name}.svg").write_text(draw(plot), "utf-8")


if __name__ == "__main__":
    write()
