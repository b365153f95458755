"""The pages of this tree as tests read them: what stands in backticks and in code blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
IMAGES = "IMAGE|python:3.11|tonistiigi/binfmt"
"""What docker runs on the pages."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path) -> Iterator[str]:
    """Yield the lines of code blocks, fenced or indented; one that goes on in the next line
    (``\\``) together with that."""
    text = re.sub(r"\\\n *", "", page.read_text("utf-8"))
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (line.strip() for line in prose.splitlines() if line.startswith("    "))


def spans(page: Path) -> Iterator[str]:
    """Yield the lines of code blocks and what stands in backticks."""
    yield from blocks(page)
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def called(page: Path, program: str) -> Iterator[str]:
    """Yield what follows the name of a program, up to a comment or the next command, wherever
    the page shows it called, also in a container.  ``program``: a regular expression."""
    before = rf"(?:docker run .* (?:{IMAGES}) )?(?:\w+=\S* )*"
    for span in spans(page):
        if found := re.match(rf"{before}(?:{program})(?![\w.-])(.*)", span):
            yield re.split(r" {2,}|[&;|#]\s|&$", found[found.lastindex or 0] + " ")[0].strip()


def options(text: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", text)
