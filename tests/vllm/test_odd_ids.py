"""Whatever clients choose, as ids, salts and options: random work goes on as with usual ids, and
nothing is left of it."""

from __future__ import annotations

import os
import random
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm.envs as envs
from vllm.v1.request import RequestStatus

from .odd_texts import HALVES, TEXTS, UNDERSTOOD, any_json, any_object
from .scheduling import Make, prompt
from .several_groups import KINDS
from .test_at_once import Node, work

IDS = (*TEXTS.values(), *HALVES.values(), "aa", "job\x008", "usual-1", "usual-2")


class Clients(Node):
    """Its requests say whatever clients may say.  Ids come again as soon as vLLM lets them."""

    def __post_init__(self) -> None:
        """Some steps admit no prefill: vLLM then asks for an import that it does not begin."""
        super().__post_init__()
        schedule, rnd = self.e.schedule, self.rnd
        self.e.schedule = lambda *_: schedule(rnd.random() < 0.2)  # type: ignore[method-assign]

    def add(self) -> None:
        busy = {part.request.request_id for _, parts in self.steps for part in parts}
        free = [text for text in IDS if text not in busy and text not in self.e.scheduler.requests]
        if not free:
            return
        name = self.rnd.choice(free)
        tokens = prompt(7, first=self.rnd.choice((1, 1, 500, 1000)))[: self.rnd.randint(3, 112)]
        self.delivered[f"earlier {len(self.delivered)}"] = self.delivered.pop(name, [])
        self.prompts[name], self.delivered[name] = tokens, []
        request = self.e.add(
            name,
            tokens,
            max_tokens=self.rnd.choice((1, 5, 30)),
            extra_args=self.options(),
            seed=self.rnd.choice((None, None, 5)),
            cache_salt=self.rnd.choice((None, None, *IDS)),
            kv_hints=any_json(self.rnd),
        )
        self.note(request)  # its blocks may be published before it is scheduled

    def schedule(self) -> None:
        """Clients hang up most while they wait, for room or for a load."""
        super().schedule()
        running = self.e.scheduler.running
        names = [name for name, one in self.e.scheduler.requests.items() if one not in running]
        if names and self.rnd.random() < 0.15:
            name = self.rnd.choice(names)
            self.e.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def options(self) -> dict[str, Any] | None:
        kind = self.rnd.random()
        if kind < 0.4:
            return None
        if kind < 0.6:
            return {"kv_transfer_params": self.rnd.choice([*UNDERSTOOD.values()])}
        return any_object(self.rnd) | {"kv_transfer_params": any_object(self.rnd)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_clients_choose_is_answered_and_leaves_nothing(
    engine: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, seed: int
) -> None:
    e = engine(asynchronous=asynchronous, num_blocks=28, max_num_batched_tokens=72, max_num_seqs=8)
    work(Clients(e, random.Random(seed)), monkeypatch)


@pytest.mark.parametrize(
    ("kind", "asynchronous"), [*zip(KINDS, cycle((False, True)), strict=False)]
)
def test_so_it_is_with_any_groups(
    engine: Make, monkeypatch: pytest.MonkeyPatch, kind: str, asynchronous: bool
) -> None:
    specs = KINDS[kind]
    num_blocks = 14 + 14 * len(specs)
    e = engine(asynchronous, num_blocks, specs, max_num_batched_tokens=72, max_num_seqs=8)
    work(Clients(e, random.Random(1)), monkeypatch)


def test_a_model_in_a_folder_whose_name_is_no_text_is_shared(
    engine: Make, tmp_path: Path, model: Path
) -> None:
    """Paths may hold any bytes, and vLLM takes this one if the tokenizer lies elsewhere."""
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9\x1b[31m"))
    odd.symlink_to(model)
    e = engine(model_path=odd, tokenizer=str(model))
    e.add("r", prompt(2), max_tokens=1)
    e.step()
    e.step()
    assert len(e.ready()) == 2
    assert e.table.model == str(odd).replace("\udce9", "?")


def test_vllm_ends_at_a_second_request_of_an_id_that_it_still_has(engine: Make) -> None:
    """While a load is under way it has even a request that has ended.  So that clients choose no
    whole ids is what lets an engine import."""
    assert envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is False
    e = engine()
    e.add("theirs", prompt(2))
    with pytest.raises(AssertionError, match="duplicate request id"):
        e.add("theirs", prompt(2))
