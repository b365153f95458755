"""What the pages call of others' programs exists: targets of make, options of docker, pip,
systemd and kubectl; and every variable.  Those of vLLM: tests/test_docs_vllm.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from .pages import IMAGES, PAGES, ROOT, called, every_page, options, spans

PIP = (sys.executable, "-m", "pip")
HELPS = {
    "docker run": ("docker", "run", "--help"),
    "kubectl apply": ("kubectl", "apply", "--help"),
    "kubectl logs": ("kubectl", "logs", "--help"),
    "loginctl": ("loginctl", "--help"),
    "pip install": (*PIP, "install", "--help"),
    "pip wheel": (*PIP, "wheel", "--help"),
    "systemctl": ("systemctl", "--help"),
}
"""How a program says what it knows."""


def environ() -> dict[str, str]:
    """This environment without what a make that started the tests has put there."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("KVSHM_", "MAKE", "MFLAGS"))}


def said(*command: str) -> str:
    done = subprocess.run(command, env=environ(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@cache
def help_on(program: str) -> str:
    return said(*HELPS[program])


# -- make


def makefiles() -> str:
    return "\n".join(p.read_text() for p in (ROOT / "Makefile", *sorted(ROOT.glob("mk/*.mk"))))


@cache
def make_targets() -> set[str]:
    """What make knows as targets that are no files, as make itself says."""
    # 1: something would have to be made.
    told = subprocess.run(["make", "-qp", "help"], cwd=ROOT, capture_output=True, text=True)
    (phony,) = re.findall(r"^\.PHONY: (.*)", told.stdout, re.MULTILINE)
    return set(phony.split())


@every_page
def test_make_has_the_targets_and_reads_the_variables(page: Path) -> None:
    text, targets = makefiles(), make_targets()
    for call in called(page, "make"):
        for word in call.split():
            name, given, _ = word.partition("=")
            if given:
                assert re.search(rf"\$\({name}[) ]", text), f"make reads no {name}"
            elif word != "...":
                assert word in targets, f"make {call}"


def test_every_target_that_a_page_names_can_be_planned() -> None:
    """As far as make can say without doing it."""
    targets = {word for page in PAGES for call in called(page, "make") for word in call.split()}
    targets = {word for word in targets if "=" not in word and word != "..."}
    assert targets >= {"demo", "test", "check", "wheel", "docs", "model"}
    assert said("make", "--dry-run", *sorted(targets))


def test_what_a_variable_of_make_changes() -> None:
    assert "examples/demo.py --break" in said("make", "--dry-run", "demo", "BREAK=1")
    assert '-m "not long and not vllm"' in said("make", "--dry-run", "test", "FAST=1")
    assert '-m "not nightly and not vllm"' in said("make", "--dry-run", "test-all", "FAST=1")
    assert "elsewhere/bin/python" in said("make", "--dry-run", "test", "VENV=elsewhere")


# -- others' programs


@pytest.mark.long
@pytest.mark.parametrize("program", HELPS)
def test_programs_have_the_options_that_are_named(program: str) -> None:
    if not shutil.which(program.split()[0]):
        pytest.skip(f"{program.split()[0]} is not installed")
    calls = [call for page in PAGES for call in called(page, program)]
    assert calls, f"no page shows {program}"
    known = set(options(help_on(program)))
    for call in calls:
        given = re.split(rf" (?:{IMAGES})\b", call)[0]
        assert set(options(given)) <= known, call
        verb = next((word for word in call.split() if not word.startswith("-")), "")
        if program in ("systemctl", "loginctl"):
            assert re.search(rf"^ +{verb} ", help_on(program), re.MULTILINE), call


# -- variables and files


def test_every_variable_stands_in_the_source_too() -> None:
    """Whatever is written like one, ours or not: a page names none that nothing reads."""
    listed = said("git", "ls-files").split()
    files = [ROOT / name for name in listed if not name.endswith(".md")]
    source = "\n".join(f.read_text("utf-8", "replace") for f in files if f.is_file())
    words = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", source))
    for page in PAGES:
        text = page.read_text("utf-8")
        named = re.findall(r"\b([A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9])\b|\b([A-Z][A-Z0-9]+)=", text)
        assert {one or other for one, other in named} <= words, page.name


@every_page
def test_files_that_commands_name_exist(page: Path) -> None:
    folders = "|".join(
        path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."
    )
    for span in spans(page):
        for word in span.split()[1:]:
            if re.fullmatch(rf"(?:{folders})/[\w./-]+", word):
                assert (ROOT / word).exists(), span


def test_what_is_called_is_found() -> None:
    assert "FAST=1" in "\n".join(called(ROOT / "CONTRIBUTING.md", "make"))
    assert any("--platform" in call for call in called(ROOT / "CONTRIBUTING.md", "docker run"))
    assert "A wheel for aarch64 (**untested**)" in (ROOT / "CONTRIBUTING.md").read_text()
