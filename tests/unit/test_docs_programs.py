"""What the pages call of others' programs exists: targets of make, options of docker, pip,
systemd and kubectl; and every variable.  Those of vLLM: tests/test_docs_vllm.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .pages import IMAGES, PAGES, ROOT, called, check_pages, options, spans

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


def environ() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("KVSHM_", "MAKE", "MFLAGS"))}


def said(*command: str) -> str:
    done = subprocess.run(command, env=environ(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@cache
def help_on(program: str) -> str:
    return said(*HELPS[program])


# -- make


@cache
def makefiles() -> str:
    return "\n".join(p.read_text() for p in (ROOT / "Makefile", *sorted(ROOT.glob("mk/*.mk"))))


@cache
def make_targets() -> set[str]:
    """What make knows as targets that are no files, as make itself says."""
    # 1: something would have to be made.
    reported = subprocess.run(["make", "-qp", "help"], cwd=ROOT, capture_output=True, text=True)
    (phony,) = re.findall(r"^\.PHONY: (.*)", reported.stdout, re.MULTILINE)
    return set(phony.split())


def words_of_make(page: Path) -> Iterator[tuple[str, bool]]:
    for call in called(page, "make"):
        for word in call.split():
            name, given, _ = word.partition("=")
            if given:
                yield f"make {call}", bool(re.search(rf"\$\({name}[) ]", makefiles()))
            elif word != "...":
                yield f"make {call}", word in make_targets()


def test_make_has_the_targets_and_reads_the_variables() -> None:
    check_pages(words_of_make)


def test_every_target_that_a_page_names_can_be_planned() -> None:
    """As far as make can say without doing it."""
    targets = {word for page in PAGES for call in called(page, "make") for word in call.split()}
    targets = {word for word in targets if "=" not in word and word != "..."}
    assert targets >= {"demo", "test", "check", "wheel", "docs", "model"}
    assert said("make", "--dry-run", *sorted(targets))


def test_what_a_variable_of_make_changes() -> None:
    assert "examples/demo.py --break" in said("make", "--dry-run", "demo", "BREAK=1")
    assert '-m "not beyond and not routers and not long and not vllm and alone"' in said(
        "make", "--dry-run", "test", "FAST=1"
    )
    assert '-m "not beyond and not routers and not nightly and not vllm and alone"' in said(
        "make", "--dry-run", "test-all", "FAST=1"
    )
    assert "elsewhere/bin/python" in said("make", "--dry-run", "test", "VENV=elsewhere")


# -- others' programs


def calls_of_programs(page: Path) -> Iterator[tuple[str, bool]]:
    for program in HELPS:
        if not shutil.which(program.split()[0]):
            continue
        known = set(options(help_on(program)))
        for line in called(page, program):
            call = re.split(rf" (?:{IMAGES})(?: |$)", line)[0]  # not what runs in the container
            verb = next((word for word in call.split() if not word.startswith("-")), "")
            has_verb = program not in ("systemctl", "loginctl") or bool(
                re.search(rf"^ +{verb} ", help_on(program), re.MULTILINE)
            )
            yield f"{program} {call}", has_verb and set(options(call)) <= known


def test_programs_have_the_options_that_are_named() -> None:
    for program in HELPS:
        assert [call for page in PAGES for call in called(page, program)], (
            f"no page shows {program}"
        )
    check_pages(calls_of_programs)


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


def files_of_commands(page: Path) -> Iterator[tuple[str, bool]]:
    listed = said("git", "ls-files").split()  # not dist/ and build/, which come and go
    folders = "|".join({name.partition("/")[0] for name in listed if "/" in name})
    for span in spans(page):
        for word in span.split()[1:]:
            if re.fullmatch(rf"(?:{folders})/[\w./-]+", word):
                yield span, (ROOT / word).exists()


def test_files_that_commands_name_exist() -> None:
    check_pages(files_of_commands)


def test_files_with_long_tests_are_listed_where_developers_look() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    marked = re.compile(r"mark\.(?:long|nightly)\b")
    files = [
        path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text())
    ]
    assert len(files) > 20
    names = {path.relative_to(ROOT).as_posix() for path in files}
    listed = {
        name
        for name in names
        if f"| `{name}` |" in page or f"| `{name[: name.rindex('/') + 1]}` |" in page
    }
    assert listed == names


def test_what_is_called_is_found() -> None:
    assert "FAST=1" in "\n".join(called(ROOT / "CONTRIBUTING.md", "make"))
    assert "A wheel for aarch64 (**untested**)" in (ROOT / "CONTRIBUTING.md").read_text()
