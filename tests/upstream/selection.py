"""Which of vLLM's own tests run, as selection.toml says for one version of vLLM."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


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

    @classmethod
    def read(cls, version: str) -> Selection:
        """``version`` is a minor one, such as 0.33."""
        text = tomllib.loads((HERE / "selection.toml").read_text())

        def reasons(name: str) -> dict[str, str]:
            return {
                test: group["reason"]
                for group in text.get(name, ())
                if version in group.get("versions", [version])
                for test in group["tests"]
            }

        return cls(
            *(tuple(text[name]) for name in ("attached", "refused", "beside")),
            *map(reasons, ("left_out", "as_written", "differs")),
        )

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
    chosen = Selection.read("any")
    print(*chosen.attached, *chosen.refused, *chosen.beside)
