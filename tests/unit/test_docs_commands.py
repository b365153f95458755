"""What the pages name exists: variables, commands with their options, links, files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvshm.config import SETTINGS
from kvshm.syncpoints import VARIABLE

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
VARIABLES = {setting.name for setting in SETTINGS} | {VARIABLE}
INJECTED = {"KVSHM_PORT", "KVSHM_SERVICE_HOST"}
"""By Kubernetes."""

COMMAND = re.compile(
    r"^(?:\w+=\S* )*(kvshm-coordinator|python -m kvshm[\w.]*|kvshm(?: [a-z][\w-]*)?)(?![\w.-])(.*)"
)
MODULES = {
    "kvshm-coordinator": ("kvshm.coordinator",),
    "kvshm": ("kvshm.tools.cli",),
}
NO_FILES = re.compile(r"\d+/\d+|dist/.*")
"""Fractions, and what is built."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def spans(page: Path) -> Iterator[str]:
    """Yield what stands in backticks, line by line what stands in code blocks."""
    text = page.read_text()
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (line.strip() for line in prose.splitlines() if line.startswith("    "))
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    for span in spans(page):
        if found := COMMAND.match(span):
            command, rest = found.groups()
            yield command, re.findall(r"--[a-z][\w-]*", re.split(r"[&;|#]\s", rest)[0])


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
    assert named <= VARIABLES | INJECTED


@every_page
def test_commands_have_the_options_that_are_named(page: Path) -> None:
    for command, options in commands(page):
        known = set(re.findall(r"--[a-z][\w-]*", help_of(command)))
        assert set(options) <= known, command


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@every_page
def test_files_in_backticks_exist(page: Path) -> None:
    for span in spans(page):
        if not re.fullmatch(r"[\w.-]+(/[\w.*-]*)+", span) or NO_FILES.fullmatch(span):
            continue
        assert any(next(base.glob(span), None) for base in (ROOT, page.parent)), span


def test_commands_are_found() -> None:
    found = {command for page in PAGES for command, _ in commands(page)}
    assert {"kvshm-coordinator", "kvshm dump-index", "python -m kvshm.tools.dump_index"} <= found
