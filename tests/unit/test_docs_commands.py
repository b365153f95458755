"""What the pages name exists: variables, commands with their options, links, files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvshm._base import syncpoints, timing
from kvshm._base.setting_sources import FILE_VARIABLE
from kvshm.config import SETTINGS

from .pages import PAGES, ROOT, every_page, options, spans

VARIABLES = {setting.name for setting in SETTINGS}
VARIABLES |= {FILE_VARIABLE, syncpoints.VARIABLE, timing.VARIABLE}
INJECTED = {"KVSHM_PORT", "KVSHM_SERVICE_HOST"}
"""By Kubernetes."""

COMMAND = re.compile(
    r"^(?:\w+=\S* )*"
    r"(kvshm-coordinator|python -m kvshm[\w.]*|kvshm(?: kv)?(?: [a-z][\w-]*)?)(?![\w.-])(.*)"
)
RESULTS = {"KVSHM_GPU_RESULTS"}
"""Of benchmarks/gpu_suite.py, which is no part of the product."""
MODULES = {
    "kvshm-coordinator": ("kvshm.coordinator",),
    "kvshm": ("kvshm.tools.cli",),
}
NO_FILES = re.compile(r"\d+/\d+|dist/.*")
"""Fractions, and what is built."""


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    for span in spans(page):
        if found := COMMAND.match(span):
            command, rest = found.groups()
            yield command, options(re.split(r"[&;|#]\s", rest)[0])


@cache
def help_of(command: str) -> str:
    """Return what the command says with ``--help``; a command that does not exist fails."""
    first, *rest = command.removeprefix("python -m ").split()
    arguments = [*MODULES.get(first, (first,)), *rest, "--help"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSHM_")}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_variables_are_settings(page: Path) -> None:
    named = set(re.findall(r"\bKVSHM_[A-Z_]*[A-Z]\b", page.read_text()))
    assert named <= VARIABLES | INJECTED | RESULTS


@every_page
def test_commands_have_the_options_that_are_named(page: Path) -> None:
    for command, named in commands(page):
        assert set(named) <= set(options(help_of(command))), command


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_the_readme_or_a_page_that_is() -> None:
    found, coming = set(), [ROOT / "README.md"]
    while coming:
        if (page := coming.pop().resolve()) not in found:
            found.add(page)
            links = re.findall(r"\]\(([^):#\s]+\.md)", page.read_text())
            coming += [page.parent / link for link in links]
    assert set(PAGES) <= found


@every_page
def test_files_in_backticks_exist(page: Path) -> None:
    for span in spans(page):
        if not re.fullmatch(r"[\w.-]+(/[\w.*-]*)+", span) or NO_FILES.fullmatch(span):
            continue
        assert any(next(base.glob(span), None) for base in (ROOT, page.parent)), span


def test_commands_are_found() -> None:
    found = {command for page in PAGES for command, _ in commands(page)}
    assert {
        "kvshm-coordinator",
        "kvshm dump-index",
        "kvshm kv serve",
        "python -m kvshm.tools.dump_index",
    } <= found
