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

from .pages import PAGES, ROOT, check_pages, options, spans

VARIABLES = {setting.name for setting in SETTINGS}
VARIABLES |= {FILE_VARIABLE, syncpoints.VARIABLE, timing.VARIABLE}
INJECTED = {"KVSHM_PORT", "KVSHM_SERVICE_HOST"}

COMMAND = re.compile(
    r"^(?:\w+=\S* )*"
    r"(kvshm-coordinator|python -m kvshm[\w.]*|kvshm(?: kv)?(?: [a-z][\w-]*)?)(?![\w.-])(.*)"
)
RESULTS = {"KVSHM_GPU_RESULTS"}
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


def variables(page: Path) -> Iterator[tuple[str, bool]]:
    for name in re.findall(r"\bKVSHM_[A-Z_]*[A-Z]\b", page.read_text()):
        yield name, name in VARIABLES | INJECTED | RESULTS


def test_variables_are_settings() -> None:
    check_pages(variables)


def options_of_commands(page: Path) -> Iterator[tuple[str, bool]]:
    for command, named in commands(page):
        known = options(help_of(command))
        yield from ((f"{command} {option}", option in known) for option in named)


def test_commands_have_the_options_that_are_named() -> None:
    check_pages(options_of_commands)


def links(page: Path) -> Iterator[tuple[str, bool]]:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link:
            yield link, target.exists() and (not anchor or anchor in anchors(target))


def test_links_lead_somewhere() -> None:
    assert sum("#" in link for page in PAGES for link, _ in links(page)) > 30
    check_pages(links)


def test_every_page_is_linked_from_the_readme_or_a_page_that_is() -> None:
    found, coming = set(), [ROOT / "README.md"]
    while coming:
        if (page := coming.pop().resolve()) not in found:
            found.add(page)
            linked = re.findall(r"\]\(([^):#\s]+\.md)", page.read_text())
            coming += [page.parent / link for link in linked]
    assert set(PAGES) <= found


def files(page: Path) -> Iterator[tuple[str, bool]]:
    for span in spans(page):
        if re.fullmatch(r"[\w.-]+(/[\w.*-]*)+", span) and not NO_FILES.fullmatch(span):
            yield span, any(next(base.glob(span), None) for base in (ROOT, page.parent))


def test_files_in_backticks_exist() -> None:
    check_pages(files)


def test_commands_are_found() -> None:
    found = {command for page in PAGES for command, _ in commands(page)}
    assert {
        "kvshm-coordinator",
        "kvshm dump-index",
        "kvshm kv serve",
        "python -m kvshm.tools.dump_index",
    } <= found
