"""What an engine does, exporting and importing: one rule for everything that limits it.

A source (a setting, vLLM's configuration, what of vLLM is found changed) may take exporting or
importing away.  None gives back what another one took.  The table of all sources stands in
docs/configuration.md.
"""

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
    """What one source takes away; nothing, as a rule."""

    source: str
    """As the log names it: ``KVSHM_ROLE=consumer``."""
    no_exports: bool
    no_imports: bool


class Decision(NamedTuple):
    """What is left to an engine."""

    no_exports: str
    """The source that took exporting away; empty if the engine exports."""
    no_imports: str
    """The source that took importing away; empty if the engine imports."""

    @property
    def refusal(self) -> str | None:
        """Why the engine shares nothing at all, or None."""
        if not (self.no_exports and self.no_imports):
            return None
        if self.no_exports == self.no_imports:
            return self.no_exports
        return f"{self.no_exports} rules out exporting, and {self.no_imports} importing"


def decide_role(limits: Iterable[Limit]) -> Decision:
    """Return what these limits leave, and which source took the rest: the first one that did."""
    given = tuple(limits)
    no_exports = (limit.source for limit in given if limit.no_exports)
    no_imports = (limit.source for limit in given if limit.no_imports)
    return Decision(next(no_exports, ""), next(no_imports, ""))
