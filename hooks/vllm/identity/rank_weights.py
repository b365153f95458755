"""What one rank knows of its model's weights: their digest, and whether it still holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ...weights import Place, WeightsUnknown, hook_tables, model_code
from ...witness import WeightWitness
from ..adapters import AdapterDigests
from ..expert_ranks import OwnShare
from .fields import find_draft, find_model
from .weights import watch_weights, weight_places


class RankWeights:
    """The weights of one rank.  The worker's main thread, unless noted."""

    def __init__(
        self,
        seconds: float,
        written: Callable[[str], None],
        share: Callable[[Any], OwnShare | None] = lambda _: None,
    ) -> None:
        """``seconds``: in which the witness looks at every tensor once.  ``written``: called on its
        thread with the name of a parameter that was found written.  ``share`` returns this rank's
        share of the model's experts, if ranks of other engines hold some, too."""
        self._share_of = share
        self.share: OwnShare | None = None
        self.models: list[torch.nn.Module] = []
        """The worker's model and, if any, the model that drafts for it, whose layers have a part in
        each block; empty if the former was not found."""
        self.adapters: AdapterDigests
        """What it has loaded beside them; set by this object's owner."""
        self.described = True  # whether the last description still fits the weights
        self.written = ""  # a parameter that was found written and is not reported yet
        self._tell = written
        self._owners: list[Any] = []
        self._changing: Callable[[], None] = lambda: None
        self._code: list[object] = []  # ``model_code`` at the start
        self._witness = WeightWitness(seconds, self._found, self._elsewhere)

    def find(
        self,
        owners: Iterable[Any],
        changing: Callable[[], None],
        unmapping: Callable[[], None] = lambda: None,
    ) -> None:
        """Find the model among vLLM's objects; ``changing`` is called before any of their methods
        writes weights, ``unmapping`` before one unmaps memory, the KV cache's too."""
        self._owners, self._changing = list(owners), changing
        self.models = self._find()
        watch_weights([*self.models, *self._owners], changing, unmapping)
        if self.models:
            self._code = self._code_now()

    def find_share(self, parallel_config: Any) -> None:
        """Find the ranks that hold experts of the same model.  Raises TransportError."""
        if self.share is None:
            self.share = self._share_of(parallel_config)

    def _find(self) -> list[torch.nn.Module]:
        if (model := find_model(self._owners)) is None:
            return []
        draft = find_draft(self._owners)
        return [model] if draft is None else [model, draft]

    def _code_now(self) -> list[object]:
        return [code for model in self.models for code in model_code(model)]

    def find_again(self) -> str:
        """Find the models that vLLM has now, after calls of the ranks.  Returns why their blocks
        cannot be compared with those of other engines; empty if they can."""
        known = set(map(id, self.models))
        self.models = self._find()
        watch_weights((model for model in self.models if id(model) not in known), self._changing)
        if not self.models:
            return "the model was not found, its weights are unknown"
        if self._code_now() != self._code:
            return (
                "forward hooks were added to the model, or its modules got another class or "
                "forward: what they compute cannot be compared"
            )
        return ""

    def described_by(self, describe: Callable[[dict[object, bytes]], Any]) -> tuple[Any, float]:
        """Return the result of ``describe``, which digests each weight into its argument, and the
        seconds that it took; watch the weights from before it began.  Raises WeightsUnknown if they
        cannot be watched, and what ``describe`` raises."""
        start = time.monotonic()
        digests: dict[object, bytes] = {}
        self.described, self.written = True, ""
        if self.share is not None:
            self.share.begin()
        try:
            modules = [module for model in self.models for module in model.modules()]
            tables = [table for model in self.models for table in hook_tables(model)]
            self._witness.prepare(
                self._places(),
                lambda: (self._find(), list(map(len, tables)), list(map(type, modules))),
            )
        except (RuntimeError, TypeError, KeyError) as exc:  # whatever torch says of a tensor
            raise WeightsUnknown(f"the weights cannot be sampled: {exc}") from exc
        try:
            description = describe(digests)
            self._witness.watch(digests)
        except BaseException:
            self._witness.stop()  # nothing is shared
            raise
        return description, time.monotonic() - start

    def _places(self) -> Iterator[Place]:
        for number, model in enumerate(self.models):
            for place in weight_places(model):
                yield place._replace(name=f"draft: {place.name}") if number else place

    def change(self) -> None:
        """Read the weights, which are about to change or go, no more until they are described."""
        self.described = False
        self.hide()
        self.unwatch()

    def unwatch(self) -> None:
        """As ``change``, because of what others hold: the own experts stay as they were shown."""
        self.described = False
        self._witness.stop()

    def show(self, fields: Mapping[str, str]) -> tuple[str, int] | None:
        """Show other engines the digests in this rank's ``fields``; returns where."""
        if self.share is None:
            return None
        self.share.show(fields)
        if self._own_write() or not self.described:  # another thread found nothing to hide
            self.hide()
        return self.share.where

    def hide(self) -> None:
        """Tell other engines that the experts of this rank may not be any more what was described.
        Any thread."""
        if self.share is not None:
            self.share.hide()

    def still_hold(self) -> bool:
        """Whether samples show the weights as they were described.  Blocks for milliseconds."""
        if self.described and not self.written and (name := self._witness.look()):
            self._found(name)
        return self.described and not self.written

    def close(self) -> None:
        """End the witness's thread."""
        self._witness.close()
        if self.share is not None:
            self.share.close()

    def _own_write(self) -> bool:
        return bool(self.written) and self.written != self._elsewhere()

    def _elsewhere(self) -> str:
        return self.share.changed() if self.share is not None else ""

    def _found(self, name: str) -> None:
        self.written = name  # first: whoever opens an epoch at this moment looks at it afterwards
        if self._own_write():
            self.hide()
        self._tell(name)
