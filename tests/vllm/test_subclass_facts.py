"""docs/vllm-facts.toml knows each class of vLLM that can stand in the place of one on which a fact
rests.  No engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from vllm_facts import facts, left_out, subclasses
from vllm_subclasses import Named, read_all
from vllm_subclasses import subclasses as subclasses_in

from .odd_vllm import installed

HERE = installed()
OTHER = Path(os.environ.get("OTHER_VLLM", Path(__file__).parents[2] / ".venv-0.33"))
PACKAGES = [*dict.fromkeys([HERE.resolve(), *OTHER.resolve().glob("lib/python3*/*/vllm")])]
LISTED, LEFT_OUT = subclasses(), left_out()
PINNED = {(file, name.partition(".")[0]) for fact in facts() for file, name in fact.sources}

each = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.parents[3].name)


Edge = tuple[Named, Named]


@cache
def texts_of(package: Path) -> Mapping[str, str]:
    return read_all(package)


@cache
def edges_of(package: Path) -> list[Edge]:
    return [*edges(texts_of(package))]


def edges(texts: Mapping[str, str]) -> Iterator[Edge]:
    """Each class on which a fact rests, or which can stand in its place, with a direct subclass."""
    found = subclasses_in(texts, PINNED)
    waiting = sorted(PINNED)
    for base in waiting:  # grows
        for sub in sorted(found.get(base, ())):
            yield base, sub
            waiting += [] if sub in LEFT_OUT or sub in waiting else [sub]


def unknown(found: Iterable[Edge]) -> list[str]:
    return [
        f"{sub_file}: {sub} has the base {base[1]} in {base[0]}: list it in docs/vllm-facts.toml"
        for base, (sub_file, sub) in found
        if (sub_file, sub) not in LISTED.get(base, []) and (sub_file, sub) not in LEFT_OUT
    ]


@each
def test_each_subclass_is_listed_or_left_out(package: Path) -> None:
    assert unknown(edges_of(package)) == []


@pytest.mark.skipif(len(PACKAGES) < 2, reason=f"{OTHER} does not exist: make setup VLLM=0.33")
def test_each_class_that_is_listed_is_a_subclass() -> None:
    found = [edge for package in PACKAGES for edge in edges_of(package)]
    assert {(base, sub) for base, subs in LISTED.items() for sub in subs} <= {*found}
    assert {*LEFT_OUT} <= {sub for _, sub in found}


def test_no_class_is_both_listed_and_left_out() -> None:
    assert not {sub for subs in LISTED.values() for sub in subs} & {*LEFT_OUT}
    assert all(reason.strip(" .") == reason != "" for reason in LEFT_OUT.values())


def edges_with(text: str) -> Iterator[Edge]:
    """Of a part of vLLM, which takes less time than all of it, and one file more."""
    folders = ("v1/core/sched/", "v1/executor/")
    part = {file: text for file, text in texts_of(HERE).items() if file.startswith(folders)}
    return edges({**part, "v1/core/odd/odd.py": text})


SCHEDULER = "from vllm.v1.core.sched.scheduler import Scheduler"


def test_a_subclass_that_appears_is_named(subtests: pytest.Subtests) -> None:
    for text in [
        f"{SCHEDULER}\nclass Odd(Scheduler): ...",
        f"{SCHEDULER} as Other\nclass Odd(\n    Mixin, Other[int]\n): ...",
        "from ..sched.scheduler import Scheduler\nclass Odd(Scheduler): ...",
        # A name that a package hands on, and one of a module.
        "from vllm.v1.core.sched import Scheduler\nclass Odd(Scheduler): ...",
        "from vllm.v1.core.sched import scheduler\nclass Odd(scheduler.Scheduler): ...",
        f"def make():\n    {SCHEDULER}\n    class Odd(Scheduler): ...\n    return Odd",
        # A subclass of one that is found.
        "from vllm.v1.core.sched.async_scheduler import AsyncScheduler as A\nclass Odd(A): ...",
    ]:
        with subtests.test(text=text):
            [said] = unknown(edges_with(text))
            assert said.startswith("v1/core/odd/odd.py: Odd has the base ")


@pytest.mark.parametrize(
    "text",
    [
        "class Scheduler: ...\nclass Odd(Scheduler): ...",
        "from concurrent.futures import Executor\nclass Odd(Executor): ...",
        "from vllm.v1.core.sched.interface import SchedulerInterface\n"
        "class Odd(SchedulerInterface): ...",
        # Its base is left out.
        "from vllm.v1.core.sched.diffusion_scheduler import DiffusionScheduler\n"
        "class Odd(DiffusionScheduler): ...",
    ],
)
def test_another_class_is_not(text: str) -> None:
    assert unknown(edges_with(text)) == []
