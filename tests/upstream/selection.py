"""Which of vLLM's own tests run, as selection.toml says for one version of vLLM."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = ("tests/v1/core", "tests/v1/kv_connector")
"""Of vLLM's source package: each file of tests in these runs, or there is a reason."""


@dataclass(frozen=True)
class Selection:
    attached: tuple[str, ...]
    """Files in which kvshm must have been beside a scheduler or a KV cache manager."""
    refused: tuple[str, ...]
    """Files in which it must have left one alone, because that has another connector."""
    beside: tuple[str, ...]
    """Files that make neither."""
    left_out: dict[str, str]
    """By a test's id, function or file, why the test is left out."""
    as_written: dict[str, str]
    """... why the test's engines have a prefix cache only if the test says so."""
    differs: dict[str, str]
    """... why the test may end otherwise with kvshm."""
    not_selected: dict[str, str]
    """By a pattern of files, why they do not run."""

    @classmethod
    def read(cls, version: str) -> Selection:
        """``version`` is a minor one, such as 0.33."""
        text = tomllib.loads((HERE / "selection.toml").read_text())

        def reasons(name: str, of: str = "tests") -> dict[str, str]:
            return {
                test: group["reason"]
                for group in text.get(name, ())
                if version in group.get("versions", [version])
                for test in group[of]
            }

        return cls(
            *(tuple(text[name]) for name in ("attached", "refused", "beside")),
            *map(reasons, ("left_out", "as_written", "differs")),
            not_selected=reasons("not_selected", "files"),
        )

    @property
    def files(self) -> tuple[str, ...]:
        """What runs, in this order."""
        return (*self.attached, *self.refused, *self.beside)

    def unexplained(self, source: Path) -> Iterator[str]:
        """Name the files of tests that neither run nor have a reason why not.  ``source``: vLLM's
        unpacked source package."""
        for file in (path for folder in FOLDERS for path in (source / folder).rglob("test_*.py")):
            name = file.relative_to(source).as_posix()
            if name not in self.files and not any(fnmatch(name, p) for p in self.not_selected):
                yield name

    def leaves_out(self, test: str) -> bool:
        return _named(test, self.left_out)

    def runs_as_written(self, test: str) -> bool:
        return _named(test, self.as_written)

    def may_differ(self, test: str) -> bool:
        return _named(test, self.differs)


def _named(test: str, names: Iterable[str]) -> bool:
    """Whether a test's id, its function or its file is among the names."""
    return not {test, test.partition("[")[0], test.partition("::")[0]}.isdisjoint(names)


if __name__ == "__main__":
    print(*Selection.read("any").files)
