"""Whether kvshm shares on this vLLM: decided by vLLM's source, not by its version.

``known_sources.json`` has digests of all functions and classes on whose behaviour kvshm relies
(docs/vllm-facts.md), as each tested version has them.  An engine shares if all of them are known.
Pure but for ``admit``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from sysconfig import get_config_var
from typing import Any, NamedTuple

from kvshm._base.log import logger
from kvshm._base.log_lines import FilledLine

from ..log_lines import HookLine
from .source_digests import bytes_digest, code_digests

log = logger(__name__)

KNOWN = Path(__file__).with_name("known_sources.json")
ABSENT = "absent"
"""Stands for a digest where a version has no such function or class."""
_PRE_RELEASE = re.compile(r"(a|b|rc|dev)\d")
"""Start of a version's parts behind the third, unless it is a release or a local build."""
_EXTENSIONS = (str(get_config_var("EXT_SUFFIX")), ".abi3.so", ".so")
"""Of compiled modules, which Python imports before the source."""
_NAMED = 3
"""Most differences that a line of the log names."""

Version = tuple[int | str, ...]
"""As vLLM's ``__version_tuple__``; a development tree's may be (0, 0, "dev")."""


class Difference(NamedTuple):
    """A function or class that is as in none of the tested versions."""

    file: str  # below vLLM's package
    name: str  # dotted: ``Class.method``; empty if the file is missing
    facts: tuple[str, ...]  # keys of those that rest on it (docs/vllm-facts.md)


class Examined(NamedTuple):
    """What was found in the source of an installed vLLM."""

    different: tuple[Difference, ...] = ()
    unreadable: tuple[str, ...] = ()  # files without source: compiled or zipped


class Admission(NamedTuple):
    """Whether an engine shares on its vLLM: if not, why."""

    refusal: str | None = None
    notice: FilledLine | None = None
    """What an engine that shares logs once."""


def admit(allowed: bool) -> Admission:
    """Return whether kvshm shares on the vLLM of this process.  ``allowed``: the setting
    KVSHM_UNTESTED.

    Any process that has imported vLLM.  The first call reads source files (docs/versions.md says
    for how long); what goes wrong is logged and a refusal.
    """
    import vllm

    try:
        version, tested = vllm.__version_tuple__, known_sources()["versions"]
        found = _examined(str(vllm.__file__), tested_as(version, tested))
        return decide(version, found, tested, allowed)
    except Exception as exc:  # any: whatever vLLM's files hold, the engine serves unshared
        log.line(HookLine.SOURCE_UNREADABLE, exc_info=exc)
        return Admission(f"this vLLM cannot be compared: {type(exc).__name__}: {exc}")


@cache
def known_sources() -> Mapping[str, Any]:
    """Return the content of ``known_sources.json``: the tested ``versions``; and ``files``, each
    with digests of all of it (``whole``), which are fast to compute, and of its ``parts``,
    functions and classes, the ``facts`` and ``digests``.  Each digest has the versions that have
    it.  Raises RuntimeError for a damaged file."""
    try:
        known: Mapping[str, Any] = json.loads(KNOWN.read_bytes())
        next(iter(known["files"])), known["versions"][0]  # neither is empty
    except (OSError, ValueError, LookupError, StopIteration) as exc:
        raise RuntimeError(f"{KNOWN} is damaged ({exc}): install kvshm again") from exc
    return known


@cache
def _examined(package: str, own: str | None) -> Examined:
    known = known_sources()["files"]
    return examine(Path(package).parent, known if own is None else of_version(known, own))


# -- what the source says


def examine(root: Path, known_files: Mapping[str, Any]) -> Examined:
    """Compare the vLLM in the folder ``root`` with the digests of tested versions."""
    if not root.is_dir():  # in an archive
        return Examined(unreadable=tuple(known_files))
    different: list[Difference] = []
    unreadable: list[str] = []
    for file, known in known_files.items():
        if _is_compiled(root / file):
            unreadable.append(file)
        else:
            different += _differences(file, _content(root / file), known)
    return Examined(tuple(different), tuple(unreadable))


def of_version(known_files: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return only what is known of one tested version: whatever has its number and is as in another
    one is a mixture, for example left by an installation that was interrupted."""

    def its(digests: Mapping[str, list[str]]) -> dict[str, list[str]]:
        return {digest: having for digest, having in digests.items() if version in having}

    return {
        file: {
            "whole": its(known["whole"]),
            "parts": {
                name: {**part, "digests": its(part["digests"])}
                for name, part in known["parts"].items()
            },
        }
        for file, known in known_files.items()
    }


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_compiled(path: Path) -> bool:
    """Whether Python would import the module from something else than this file."""
    first = [path.with_suffix(suffix) for suffix in _EXTENSIONS]
    if any(map(os.path.exists, (path.with_suffix("") / "__init__.py", *first))):
        return True
    return path.with_suffix(".pyc").exists() and not path.exists()


def _differences(
    file: str, content: bytes | None, known: Mapping[str, Any]
) -> Iterable[Difference]:
    parts: Mapping[str, Any] = known["parts"]
    if content is None:
        gone = [part for part in parts.values() if ABSENT not in part["digests"]]
        facts = dict.fromkeys(fact for part in gone for fact in part["facts"])
        return [Difference(file, "", tuple(facts))] if gone else []
    if bytes_digest(content) in known["whole"]:
        return []
    return [
        Difference(file, name, tuple(parts[name]["facts"])) for name in _unknown(content, parts)
    ]


def _unknown(content: bytes, parts: Mapping[str, Any]) -> list[str]:
    """Return the names whose code is as in no tested version."""
    try:
        exact = code_digests(content, parts)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a damaged file
        return [*parts]
    return [name for name in parts if (exact[name] or ABSENT) not in parts[name]["digests"]]


# -- what follows from it


def decide(version: Version, found: Examined, tested: list[str], allowed: bool) -> Admission:
    """Return whether an engine shares.  ``tested``: whole versions, the oldest first."""
    own = tested_as(version, tested)
    if version[:2] != (0, 0) and version[:2] < minors(tested)[0]:
        return Admission(f"vLLM {dotted(version)} is too old, kvshm needs {tested[0]} or newer")
    if own is not None and (gone := [part.file for part in found.different if not part.name]):
        return Admission(
            f"this vLLM {dotted(version)} is incomplete, without "
            f"{_some([f'vllm/{file}' for file in gone])}: install vLLM again"
        )
    if found.different:
        like = tested if own is None else [own]
        remedy = "upgrade kvshm" if own is None else "install vLLM again"
        return _if_allowed(_changed(version, found.different, like), allowed, remedy)
    if found.unreadable and not (_is_release(version) and version[:2] in minors(tested)):
        return _if_allowed(_unknown_without_source(version, found.unreadable, tested), allowed)
    if found.unreadable:
        return Admission(notice=HookLine.NO_SOURCE.fill(_some(found.unreadable), dotted(version)))
    if own is not None:
        return Admission()
    return Admission(notice=HookLine.TESTED_LIKE.fill(dotted(version), _and(tested)))


def tested_as(version: Version, tested: Sequence[str]) -> str | None:
    """Return which of the ``tested`` versions this is, or is a build of; None: another."""
    own = dotted(version[:3])
    return own if _is_release(version) and own in tested else None


def _is_release(version: Version) -> bool:
    return not any(_PRE_RELEASE.match(str(part)) for part in version[3:])


def _if_allowed(what: str, allowed: bool, remedy: str = "upgrade kvshm") -> Admission:
    if allowed:
        return Admission(notice=HookLine.UNTESTED.fill(what))
    return Admission(
        f"{what}; {remedy}, or KVSHM_UNTESTED=1 shares all the same, and answers may be wrong"
    )


def _changed(version: Version, different: Iterable[Difference], tested: list[str]) -> str:
    named = [
        f"{name} in vllm/{file} (fact {', '.join(facts)})"
        if name
        else f"vllm/{file}, which is missing (fact {', '.join(facts)})"
        for file, name, facts in different
    ]
    return (
        f"vLLM {dotted(version)} is not as the tested {_and(tested)} in what kvshm relies on: "
        f"{_some(named)}"
    )


def _unknown_without_source(version: Version, files: Sequence[str], tested: list[str]) -> str:
    return (
        f"vLLM {dotted(version)} is not among the tested {_and(tested)}, and has no source of "
        f"{_some(files)} to compare"
    )


def minors(versions: Iterable[str]) -> list[tuple[int, int]]:
    """Return the minor versions of whole ones, each once, the oldest first."""
    return sorted({(int(v.split(".")[0]), int(v.split(".")[1])) for v in versions})


def dotted(version: Version) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return "; ".join(names[:_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _and(versions: list[str]) -> str:
    return " and ".join(versions)
