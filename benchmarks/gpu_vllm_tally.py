"""What prompts should have imported and hit, and what they did: a run that measured less fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_ROUNDS = 2


@dataclass
class Tally:
    """Of one length of prefix or of a whole run."""

    rounds: int = 0
    """In which everything was imported and hit that should be."""
    imported_tokens: int = 0
    tokens_to_import: int = 0
    not_imported: int = 0
    """Additions of which some token was not imported."""
    hit_tokens: int = 0
    tokens_to_hit: int = 0
    not_hit: int = 0
    """Additions of which some token was not hit locally, as vLLM counts it."""

    def add(self, expected: int, imported: int, hit: int) -> bool:
        """Take what was imported and then hit of so many tokens; False if some were not."""
        self.tokens_to_import += expected
        self.imported_tokens += imported
        self.not_imported += imported < expected
        self.tokens_to_hit += expected
        self.hit_tokens += hit
        self.not_hit += hit < expected
        whole = imported >= expected and hit >= expected
        self.rounds += whole
        return whole

    def faults(self, what: str) -> list[str]:
        """Name all for which the numbers of ``what`` are worth nothing."""
        found = []
        if self.rounds < FEWEST_ROUNDS:
            found.append(f"{what}: {self.rounds} whole rounds, and {FEWEST_ROUNDS} are needed")
        if self.not_imported:
            share = f"{self.imported_tokens} of {self.tokens_to_import} tokens"
            found.append(f"{what}: {share} were imported ({self.not_imported} times too few)")
        if self.not_hit:
            share = f"{self.hit_tokens} of {self.tokens_to_hit} tokens"
            found.append(f"{what}: {share} were hit locally ({self.not_hit} times too few)")
        return found


def judged(faults: Sequence[str]) -> bool:
    """Print all faults; whether there are none."""
    for fault in faults:
        print(f"FAILED: {fault}", flush=True)
    return not faults
