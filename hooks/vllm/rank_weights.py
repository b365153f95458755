"""What one rank knows of its model's weights: their digest, and whether it still holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..weights import WeightsUnknown, hook_tables, model_code
from ..witness import WeightWitness
from .identity import find_model
from .weights import watch_weights, weight_places


class RankWeights:
    """The weights of one rank.  Used by the worker's main thread, except where that is said."""

    def __init__(self, seconds: float, written: Callable[[str], None]) -> None:
        """``seconds``: in which the witness looks at every tensor once.  ``written``: called on the
        witness's thread once it has found a parameter written, which ``written`` then names."""
        self.model: torch.nn.Module | None = None
        self.described = True
        """Whether the last description still fits the weights."""
        self.written = ""
        """A parameter that was found written and is not reported yet; empty if there is none."""
        self._tell = written
        self._owners: list[Any] = []
        self._changing: Callable[[], None] = lambda: None
        self._code: list[object] = []
        """``model_code`` at the start."""
        self._witness = WeightWitness(seconds, self._found)

    def find(self, owners: Iterable[Any], changing: Callable[[], None]) -> None:
        """Find the model among vLLM's objects, and have ``changing`` called before any of their
        methods writes weights."""
        self._owners, self._changing = list(owners), changing
        self.model = find_model(self._owners)
        if self.model is not None:
            watch_weights([self.model, *self._owners], changing)
            self._code = model_code(self.model)

    def find_again(self) -> str:
        """Find the model that vLLM has now: a call of the ranks may have exchanged it, or what its
        modules compute.  Returns why its blocks cannot be compared with those of other engines;
        empty if they can."""
        model = find_model(self._owners)
        if model is not self.model and model is not None:
            watch_weights([model], self._changing)
        self.model = model
        if model is None:
            return "the model was not found, its weights are unknown"
        if model_code(model) != self._code:
            return (
                "forward hooks were added to the model, or its modules got another class or "
                "forward: what they compute cannot be compared"
            )
        return ""

    def described_by(self, describe: Callable[[dict[object, bytes]], Any]) -> tuple[Any, float]:
        """Return what ``describe`` returns, which digests the weights with what it is given, and
        how many seconds that took; watch the weights from before it began.  Raises WeightsUnknown
        if they cannot be watched, and what ``describe`` raises."""
        begun = time.monotonic()
        digests: dict[object, bytes] = {}
        assert self.model is not None
        self.described, self.written = True, ""
        try:
            tables, modules = hook_tables(self.model), list(self.model.modules())
            self._witness.prepare(
                weight_places(self.model),
                lambda: (
                    find_model(self._owners),
                    list(map(len, tables)),
                    list(map(type, modules)),
                ),
            )
        except (RuntimeError, TypeError, KeyError) as exc:  # whatever torch says of a tensor
            raise WeightsUnknown(f"the weights cannot be sampled: {exc}") from exc
        try:
            told = describe(digests)
            self._witness.watch(digests)
        except BaseException:
            self._witness.stop()  # nothing is shared
            raise
        return told, time.monotonic() - begun

    def change(self) -> None:
        """The weights are about to be written, unmapped or exchanged: nothing reads them until they
        are described again."""
        self.described = False
        self._witness.stop()

    def still_hold(self) -> bool:
        """Whether the weights are as they were described, as far as samples tell.  Blocks for
        milliseconds."""
        if self.described and not self.written and (name := self._witness.look()):
            self._found(name)
        return self.described and not self.written

    def close(self) -> None:
        """End the witness's thread."""
        self._witness.close()

    def _found(self, name: str) -> None:
        self.written = name  # first: whoever opens an epoch at this moment looks at it afterwards
        self._tell(name)
