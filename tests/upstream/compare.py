"""Compare a run of vLLM's own tests with kvshm to one without it, and both to the committed list.

    python compare.py 0.33 SOURCE WITHOUT.json WITH.json   fails if anything is not as listed
    python compare.py 0.33 SOURCE WITHOUT.json WITH.json --write   writes the list anew

A line of the list is a test, all its parameters together: how often it ended how, with kvshm too if
that differs, beside how many schedulers and KV cache managers kvshm was, and how many blocks were
published when it ended, if any were.  All are the same in each run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .selection import HERE, Selection

Outcomes = Mapping[str, Mapping[str, Any]]
"""By a test's id what both_runs.py has written: ``outcome``, and the counts of injection.py."""

ENDS = ("passed", "failed", "skipped")


class Line(NamedTuple):
    """What became of one test, over all its parameters."""

    without: Counter[str]
    with_kvshm: Counter[str]
    counts: Counter[str]
    """Of injection.py."""

    def __str__(self) -> str:
        same = _said(self.without)
        ends = same if self.without == self.with_kvshm else f"{same}; {_said(self.with_kvshm)} with"
        published = f"; published {n}" if (n := self.counts["published"]) else ""
        return f"{ends}; attached {self.counts['attached']}{published}"


def _said(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[word]} {word}" for word in ENDS if counts[word]) or "none"


def lines_of(without: Outcomes, with_kvshm: Outcomes) -> dict[str, str]:
    """Return the list: by test, without its parameters, what became of it."""
    found: dict[str, Line] = {}
    for run, outcomes in enumerate((without, with_kvshm)):
        for test, told in outcomes.items():
            name = test.partition("[")[0]
            line = found.setdefault(name, Line(Counter(), Counter(), Counter()))
            line[run][told["outcome"]] += 1
            if run:
                line.counts.update({n: told.get(n, 0) for n in ("attached", "published")})
    return {name: str(line) for name, line in sorted(found.items())}


def as_text(lines: Mapping[str, str]) -> str:
    return "".join(f"{name}  {line}\n" for name, line in lines.items())


def read(text: str) -> dict[str, str]:
    return dict(line.split("  ", 1) for line in text.splitlines() if line)


def offences(
    without: Outcomes, with_kvshm: Outcomes, listed: Mapping[str, str], chosen: Selection
) -> Iterator[str]:
    """Say what is not as it must be, with the names of the tests."""
    for test in sorted(without.keys() | with_kvshm.keys()):
        ends = [run.get(test, {}).get("outcome", "missing") for run in (without, with_kvshm)]
        if ends[0] != ends[1] and not chosen.may_differ(test):
            yield f"{test}: {ends[0]} without kvshm, {ends[1]} with it"
    lines = lines_of(without, with_kvshm)
    for test in sorted(listed.keys() | lines.keys()):
        was, now = listed.get(test, "not listed"), lines.get(test, "has not run")
        if was != now:
            yield f"{test}: {now}; in the list: {was}"
    for name, files in (("attached", chosen.attached), ("unshared", chosen.refused)):
        for file in files:
            told = (with_kvshm[test] for test in with_kvshm if test.startswith(file))
            if not any(one.get(name) for one in told):
                yield f"{file}: no scheduler and no KV cache manager was {name}"


def summary(without: Outcomes, with_kvshm: Outcomes, left_out: int) -> str:
    """Return the numbers of docs/versions.md."""
    ends = [Counter(t["outcome"] for t in run.values()) for run in (without, with_kvshm)]
    names = ("attached", "unshared", "published")
    sums = {n: sum(t.get(n, 0) for t in with_kvshm.values()) for n in names}
    beside = sum(bool(t.get("attached")) for t in with_kvshm.values())
    return (
        f"without kvshm: {_said(ends[0])}\n"
        f"with kvshm:    {_said(ends[1])}\n"
        f"left out:      {left_out}\n"
        f"kvshm was beside {sums['attached']} schedulers and KV cache managers, in {beside} tests; "
        f"left alone, as in production: {sums['unshared']}; "
        f"published {sums['published']} blocks"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("source", type=Path, help="vLLM's unpacked source package")
    parser.add_argument("without", type=Path)
    parser.add_argument("with_kvshm", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    files = [json.loads(path.read_text()) for path in (args.without, args.with_kvshm)]
    without, with_kvshm = (file["tests"] for file in files)
    path = HERE / f"expected-{args.version}.txt"
    if args.write:
        path.write_text(as_text(lines_of(without, with_kvshm)))
    chosen = Selection.read(args.version)
    print(summary(without, with_kvshm, len(files[1]["left_out"])))
    listed = read(path.read_text()) if path.exists() else {}
    found = list(offences(without, with_kvshm, listed, chosen))
    known = [*without, *files[1]["left_out"]]
    found += [
        f"selection.toml names {name}, and there is no such test"
        for name in (*chosen.left_out, *chosen.as_written, *chosen.differs)
        if not any(test.startswith(name) for test in known)
    ]
    found += [
        f"{file} does not run, and selection.toml has no reason"
        for file in sorted(chosen.unexplained(args.source))
    ]
    print(*found, sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
