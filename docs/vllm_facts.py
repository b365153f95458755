"""What kvshm relies on in vLLM: docs/vllm-facts.toml, compared between versions of vLLM.

    python docs/vllm_facts.py compare OLD NEW    # which facts rest on what has changed, with diffs
    python docs/vllm_facts.py record VLLM...     # hooks/vllm/known_sources.json, of these versions

OLD, NEW, VLLM: a wheel or source archive of vLLM, or the folder where one is installed; ``make
vllm-facts`` and ``make vllm-facts-recorded`` fetch and name them.  ``make docs`` writes
docs/vllm-facts.md.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvshm.hooks.vllm.admission import ABSENT, KNOWN
from kvshm.hooks.vllm.source_digests import Source, bytes_digest

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
    sources: tuple[tuple[str, str], ...]
    """File below vLLM's package, and the dotted name of a function or class in it."""
    why: str
    """Why vLLM's public interface for connectors does not do; if it does, what it says."""

    @property
    def is_public(self) -> bool:
        """Whether vLLM promises it: then its source is not compared."""
        return self.section == PUBLIC


class Vllm(NamedTuple):
    """The source of one version."""

    version: str
    read: Callable[[str], bytes | None]
    """The content of a file below vLLM's package; None if there is none."""

    def source(self, file: str) -> Source:
        """Return a file, as an empty one if there is none."""
        return Source.decoded(self.read(file) or b"")


def facts() -> list[Fact]:
    """Return all facts, in the page's order.  Raises KeyError and ValueError for a bad file."""
    return [
        Fact(
            fact["key"],
            section["title"],
            fact["says"],
            fact["tests"],
            tuple(fact["relied_on_by"]),
            tuple(map(_source, fact["sources"])),
            fact["why"],
        )
        for section in tomllib.loads(FACTS.read_text("utf-8"))["section"]
        for fact in section["fact"]
    ]


def _source(text: str) -> tuple[str, str]:
    file, name = text.split(": ")
    return file, name


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
    if place.is_dir():
        return _installed(place)
    if place.suffix == ".whl":
        return Vllm(_version(place.name), _of_wheel(zipfile.ZipFile(place)))
    return Vllm(_version(place.name), _of_archive(place))


def _version(name: str) -> str:
    if (found := re.search(r"vllm(?:_cpu)?-(\d+\.\d+\.\d+)", name)) is None:
        raise ValueError(f"{name} is not the name of a vLLM with its version")
    return found[1]


def _installed(place: Path) -> Vllm:
    """In a virtual environment, or in the folder that has vLLM's package."""
    homes = [place, *place.glob("lib/python3*/site-packages")]
    home = next((home for home in homes if (home / "vllm" / "__init__.py").exists()), None)
    if home is None:
        raise FileNotFoundError(f"there is no vLLM in {place}")
    infos = [path.name for path in home.glob("vllm*.dist-info")]
    version = _version(min(infos, key=len) if infos else str(place.resolve()))

    def read(file: str) -> bytes | None:
        path = home / "vllm" / file
        return path.read_bytes() if path.exists() else None

    return Vllm(version, read)


def _of_wheel(wheel: zipfile.ZipFile) -> Callable[[str], bytes | None]:
    names = set(wheel.namelist())
    return lambda file: wheel.read(f"vllm/{file}") if f"vllm/{file}" in names else None


def _of_archive(place: Path) -> Callable[[str], bytes | None]:
    """Reads the archive once: it cannot be entered in the middle."""
    wanted = {file for fact in facts() for file, _ in fact.sources}
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
        for file, name in fact.sources:
            names.setdefault(file, {}).setdefault(name, []).append(fact.key)
    return names


def _known_file(file: str, versions: list[Vllm]) -> Mapping[str, Any]:
    names = _names()[file]
    whole: dict[str, list[str]] = {}
    outline: dict[str, list[str]] = {}
    parts: dict[str, dict[str, list[str]]] = {name: {} for name in sorted(names)}
    for vllm in versions:
        source = vllm.source(file)
        if content := vllm.read(file):
            whole.setdefault(bytes_digest(content), []).append(vllm.version)
            if (digest := source.outline_digest(names)) is not None:
                outline.setdefault(digest, []).append(vllm.version)
        for name, digest in source.whole_digests(parts).items():
            parts[name].setdefault(digest or ABSENT, []).append(vllm.version)
    for name, known in parts.items():
        if set(known) == {ABSENT}:
            raise ValueError(f"no version has {name} in vllm/{file} (docs/vllm-facts.toml)")
    return {
        "whole": whole,
        "outline": outline,
        "parts": {name: {"facts": names[name], "digests": known} for name, known in parts.items()},
    }


# -- comparing


def differences(old: Vllm, new: Vllm) -> Iterator[tuple[Fact, str, str, str]]:
    """Yield each fact that rests on something that differs, with file, name and a diff."""
    for fact in facts():
        for file, name in fact.sources:
            before, after = old.source(file), new.source(file)
            if before.digests([name]) != after.digests([name]):
                yield fact, file, name, _diff(before.definition(name), after.definition(name))


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "old", "new", "", "", 3, ""
    )
    return "\n".join([*lines][2:])


def report(old: Vllm, new: Vllm) -> str:
    """Return what a person reads before kvshm is tried with a new version."""
    found = [*differences(old, new)]
    shown: set[tuple[str, str]] = set()
    lines: list[str] = []
    for key in dict.fromkeys(fact.key for fact, *_ in found):
        of = [one for one in found if one[0].key == key]
        lines += [f"# {key}", f"{of[0][0].says}", f"Test: {of[0][0].tests}"]
        for _, file, name, diff in of:
            lines.append(f"\n## {name} in vllm/{file}")
            lines.append("(shown above)" if (file, name) in shown else diff)
            shown.add((file, name))
        lines.append("")
    touched = len(dict.fromkeys(fact.key for fact, *_ in found))
    private = [fact for fact in facts() if not fact.is_public]
    lines.append(
        f"{touched} of {len(private)} facts rest on something that {new.version} has in another "
        f"way than {old.version}: {len(shown)} of "
        f"{len({source for fact in private for source in fact.sources})} functions and classes"
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
