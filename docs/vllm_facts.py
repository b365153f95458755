"""What kvshm relies on in vLLM: docs/vllm-facts.toml, compared between versions of vLLM.

    python docs/vllm_facts.py compare OLD NEW    # which facts rest on what has changed, with diffs
    python docs/vllm_facts.py record VLLM...     # hooks/vllm/known_sources.json, of these versions

OLD, NEW, VLLM: a wheel or source archive of vLLM, or the folder where one is installed; ``make
vllm-facts`` and ``make vllm-facts-recorded`` fetch and name them.  ``make docs`` writes
docs/vllm-facts.md.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import json
import re
import sys
import tarfile
import tokenize
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm_subclasses import Named

from kvshm.hooks.vllm.admission import ABSENT, KNOWN
from kvshm.hooks.vllm.source_bindings import Scope
from kvshm.hooks.vllm.source_digests import bytes_digest, code_digests

FACTS = Path(__file__).with_name("vllm-facts.toml")
PUBLIC = "Public, and held by tests"
"""The section of what kvshm relies on and vLLM promises."""


class Fact(NamedTuple):
    """One thing that kvshm relies on."""

    key: str
    section: str
    says: str
    tests: str
    relied_on_by: tuple[str, ...]
    sources: tuple[Named, ...]
    """File below vLLM's package, and the dotted name of a function or class in it."""
    overrides: tuple[Named, ...]
    """What subclasses can have in the place of a method of ``sources``, whether they have it or
    not."""
    why: str
    """Why vLLM's public interface for connectors does not do; if it does, what it says."""

    @property
    def is_public(self) -> bool:
        """Whether vLLM promises it: then its source is not compared."""
        return self.section == PUBLIC

    @property
    def pinned(self) -> tuple[Named, ...]:
        """All of which a digest is recorded."""
        return *self.sources, *self.overrides


class Vllm(NamedTuple):
    """The source of one version."""

    version: str
    read: Callable[[str], bytes | None]
    """The content of a file below vLLM's package; None if there is none."""

    def source(self, file: str) -> bytes:
        """Return a file, as an empty one if there is none."""
        return self.read(file) or b""

    def digests(self, file: str, names: Iterable[str]) -> dict[str, str | None]:
        """Return the digest of each name in a file, None for what is not there.  Raises ValueError
        for a file that this Python cannot read or parse."""
        try:
            return code_digests(self.source(file), names)
        except (SyntaxError, ValueError) as exc:  # a NUL byte, to Python 3.11.3
            raise ValueError(f"{self._place(file)} cannot be parsed: {exc}") from exc

    def _place(self, file: str) -> str:
        return f"vllm/{file} of vLLM {self.version}"


def facts() -> list[Fact]:
    """Return all facts, in the page's order.  Raises KeyError and ValueError for a bad file."""
    listed = subclasses()
    return [
        Fact(
            fact["key"],
            section["title"],
            fact["says"],
            fact["tests"],
            tuple(fact["relied_on_by"]),
            sources := tuple(map(_source, fact["sources"])),
            tuple(one for one in _overrides(sources, listed) if one not in sources),
            fact["why"],
        )
        for section in _listed()["section"]
        for fact in section["fact"]
    ]


def subclasses() -> dict[Named, list[Named]]:
    """Return the subclasses that can stand in the place of a class, by that class."""
    listed = _listed().get("subclasses", {})
    return {_source(base): [*map(_source, subs)] for base, subs in listed.items()}


def left_out() -> dict[Named, str]:
    """Return the classes of which no subclass is recorded, nor themselves: each with the reason."""
    listed = _listed().get("left-out", {})
    return {_source(name): reason for reason, names in listed.items() for name in names}


def _listed() -> dict[str, Any]:
    return tomllib.loads(FACTS.read_text("utf-8"))


def _source(text: str) -> Named:
    file, name = text.split(": ")
    return file, name


def _overrides(sources: Iterable[Named], listed: Mapping[Named, list[Named]]) -> dict[Named, None]:
    """The methods of these names in all subclasses, each once."""
    found: dict[Named, None] = {}
    for file, name in sources:
        of, _, method = name.partition(".")
        waiting = [*listed.get((file, of), [])] if method else []
        for sub_file, sub in waiting:  # grows
            found[sub_file, f"{sub}.{method}"] = None
            waiting += listed.get((sub_file, sub), [])
    return found


def page() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield the page's sections: title, and rows of fact, reason, test and who relies on it."""
    of = facts()
    for title in dict.fromkeys(fact.section for fact in of):
        yield title, [_row(fact) for fact in of if fact.section == title]


def _row(fact: Fact) -> tuple[str, ...]:
    users = ", ".join(f"`{user}`" for user in fact.relied_on_by)
    return f"{fact.says} (`{fact.key}`)", fact.why, fact.tests, users


# -- where vLLM's source is


def vllm_at(place: Path) -> Vllm:
    """Return the vLLM in a wheel, a source archive or a folder.  Raises OSError, and ValueError if
    it does not say which version it is."""
    if not place.exists():
        raise FileNotFoundError(f"{place} does not exist")
    if place.is_dir():
        return _installed(place)
    if place.suffix == ".whl":
        return Vllm(_version(place.name), _of_wheel(zipfile.ZipFile(place)))
    return Vllm(_version(place.name), _of_archive(place))


_VERSION = re.compile(r"vllm(?:_cpu)?-(\d+\.\d+\.\d+)")


def _version(name: str) -> str:
    if (found := _VERSION.search(name)) is None:
        raise ValueError(f"{name} is not the name of a vLLM with its version")
    return found[1]


def _installed(place: Path) -> Vllm:
    """In a virtual environment, or in the folder that has vLLM's package."""
    homes = [place, *place.glob("lib/python3*/site-packages")]
    home = next((home for home in homes if (home / "vllm" / "__init__.py").exists()), None)
    if home is None:
        raise FileNotFoundError(f"there is no vLLM in {place}")
    # Not those of plugins: vllm_x-9.dist-info.
    infos = [path.name for path in home.glob("vllm*.dist-info") if _VERSION.match(path.name)]
    if len(infos) > 1:
        raise ValueError(f"{home} says twice which vLLM it has: {' and '.join(sorted(infos))}")
    version = _version(infos[0] if infos else str(place.resolve()))

    def read(file: str) -> bytes | None:
        path = home / "vllm" / file
        return path.read_bytes() if path.exists() else None

    return Vllm(version, read)


def _of_wheel(wheel: zipfile.ZipFile) -> Callable[[str], bytes | None]:
    names = set(wheel.namelist())
    return lambda file: wheel.read(f"vllm/{file}") if f"vllm/{file}" in names else None


def _of_archive(place: Path) -> Callable[[str], bytes | None]:
    """Reads the archive once: it cannot be entered in the middle."""
    wanted = {file for fact in facts() for file, _ in fact.pinned}
    contents: dict[str, bytes] = {}
    with tarfile.open(place) as archive:
        for member in archive:
            file = member.name.partition("/vllm/")[2]
            if file in wanted and (stream := archive.extractfile(member)) is not None:
                contents[file] = stream.read()
    return contents.get


# -- recording


def recorded(versions: Iterable[Vllm]) -> Mapping[str, Any]:
    """Return what ``known_sources.json`` says of these versions (admission.known_sources)."""
    of = sorted(versions, key=lambda vllm: [*map(int, vllm.version.split("."))])
    return {
        "versions": [*dict.fromkeys(vllm.version for vllm in of)],
        "files": {file: _known_file(file, of) for file in sorted(_names())},
    }


def _names() -> dict[str, dict[str, list[str]]]:
    """Per file and name the keys of the facts that rest on it."""
    names: dict[str, dict[str, list[str]]] = {}
    for fact in facts():
        for file, name in fact.pinned:
            names.setdefault(file, {}).setdefault(name, []).append(fact.key)
    return names


def _known_file(file: str, versions: list[Vllm]) -> Mapping[str, Any]:
    names = _names()[file]
    whole: dict[str, list[str]] = {}
    parts: dict[str, dict[str, list[str]]] = {name: {} for name in sorted(names)}
    for vllm in versions:
        if content := vllm.read(file):
            whole.setdefault(bytes_digest(content), []).append(vllm.version)
        for name, digest in vllm.digests(file, parts).items():
            parts[name].setdefault(digest or ABSENT, []).append(vllm.version)
    if nowhere := [name for name, known in parts.items() if {*known} == {ABSENT}]:
        _check_expected(file, nowhere)
    return {
        "whole": whole,
        "parts": {name: {"facts": names[name], "digests": known} for name, known in parts.items()},
    }


def _check_expected(file: str, nowhere: Iterable[str]) -> None:
    """Raise ValueError for a source that no version has; that a subclass overrides nothing is worth
    a record."""
    sources = {source for fact in facts() for source in fact.sources}
    for name in nowhere:
        if (file, name) in sources:
            raise ValueError(f"no version has {name} in vllm/{file} (docs/vllm-facts.toml)")


# -- comparing


class Comparison(NamedTuple):
    """What two versions have in another way."""

    differences: list[tuple[Fact, Named, str]]
    """Each fact that rests on something that differs, with that and a diff."""
    named: int
    """How many functions and classes one of the versions has."""


def comparison(old: Vllm, new: Vllm) -> Comparison:
    """Compare what facts rest on.  Raises ValueError for a file that cannot be parsed."""
    before, after = (
        {
            (file, name): digest
            for file, names in _names().items()
            for name, digest in vllm.digests(file, names).items()
        }
        for vllm in (old, new)
    )

    @cache
    def diff(one: Named) -> str:
        file, name = one
        return _diff(definition(old.source(file), name), definition(new.source(file), name))

    return Comparison(
        [
            (fact, one, diff(one))
            for fact in facts()
            for one in fact.pinned
            if before[one] != after[one]
        ],
        sum(before[one] is not None or after[one] is not None for one in before),
    )


def definition(content: bytes, name: str) -> str:
    """Return the lines that a name's digest covers, as they stand."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    lines = io.TextIOWrapper(io.BytesIO(content), encoding).read().split("\n")
    return "".join(
        "".join(f"{line}\n" for line in lines[first - 1 : last])
        for first, last in _spans(Scope.of_module(content), name.split("."))
    )


def _spans(scope: Scope, path: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and last lines of what concerns a name."""
    for binding in scope.bindings(path):
        node = binding.node
        heads = [node, *getattr(node, "decorator_list", ())]
        first = min(getattr(one, "lineno", 1) for one in heads)
        last = getattr(node, "end_lineno", None) or first
        if len(path) > 1 and isinstance(node, ast.ClassDef) and node.name == path[0]:
            yield first, max(first, min(one.lineno for one in node.body) - 1)
            yield from _spans(scope.of_class(node), path[1:])
        else:
            yield first, last


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "old", "new", "", "", 3, ""
    )
    return "\n".join([*lines][2:])


def report(old: Vllm, new: Vllm) -> str:
    """Return what a person reads before kvshm is tried with a new version."""
    found, named = comparison(old, new)
    shown: set[Named] = set()
    lines: list[str] = []
    for key in dict.fromkeys(fact.key for fact, *_ in found):
        of = [one for one in found if one[0].key == key]
        lines += [f"# {key}", f"{of[0][0].says}", f"Test: {of[0][0].tests}"]
        for _, (file, name), diff in of:
            lines.append(f"\n## {name} in vllm/{file}")
            lines.append("(shown above)" if (file, name) in shown else diff)
            shown.add((file, name))
        lines.append("")
    touched = len(dict.fromkeys(fact.key for fact, *_ in found))
    private = sum(not fact.is_public for fact in facts())
    lines.append(
        f"{touched} of {private} facts rest on something that {new.version} has in another "
        f"way than {old.version}: {len(shown)} of {named} functions and classes"
    )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Compare two versions, or write the data file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare", help="print which facts rest on what has changed")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    record = commands.add_parser("record", help="write the digests of the tested versions")
    record.add_argument("vllm", type=Path, nargs="+")
    args = parser.parse_args(arguments)
    try:
        if args.command == "compare":
            print(report(vllm_at(args.old), vllm_at(args.new)))
        else:
            known = recorded(map(vllm_at, args.vllm))
            KNOWN.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    except (OSError, ValueError, tarfile.TarError, zipfile.BadZipFile) as exc:
        sys.exit(f"vllm_facts: {exc}")


if __name__ == "__main__":
    main(sys.argv[1:])
