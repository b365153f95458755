"""Whether an engine exports and imports: any source (a setting, vLLM's configuration) may rule it
out, and no source can undo that.  docs/configuration.md lists all sources."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """What a user wants an engine to do (KVSHM_ROLE)."""

    BOTH = "both"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class Limit(NamedTuple):
    """What one source rules out; usually nothing."""

    source: str
    no_exports: bool
    no_imports: bool


class Decision(NamedTuple):
    """Whether an engine exports and imports, and if not, why."""

    no_exports: str
    """The source that rules out exporting; empty if the engine exports."""
    no_imports: str
    """The source that rules out importing; empty if the engine imports."""

    @property
    def refusal(self) -> str | None:
        if not (self.no_exports and self.no_imports):
            return None
        if self.no_exports == self.no_imports:
            return self.no_exports
        return f"{self.no_exports} rules out exporting, and {self.no_imports} importing"


def decide_role(limits: Iterable[Limit]) -> Decision:
    """Return what the limits permit.  Of several sources with the same limit the first is named."""
    given = tuple(limits)
    no_exports = (limit.source for limit in given if limit.no_exports)
    no_imports = (limit.source for limit in given if limit.no_imports)
    return Decision(next(no_exports, ""), next(no_imports, ""))
