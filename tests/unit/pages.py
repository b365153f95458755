"""The pages of this tree as tests read them: what stands in backticks and in code blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
IMAGES = "IMAGE|python:3.11|tonistiigi/binfmt"


def check_pages(things: Callable[[Path], Iterator[tuple[str, bool]]]) -> None:
    """Show all that is wrong on any page.  ``things`` yields whatever of one kind stands on a
    page, and whether it is right; one that finds nothing on all pages does not know how it is
    written."""
    found = [(page, *each) for page in PAGES for each in things(page)]
    assert found
    wrong = [f"{page.relative_to(ROOT)}: {thing}" for page, thing, right in found if not right]
    assert not wrong, "\n" + "\n".join(wrong)


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
