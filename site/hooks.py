"""What the site has beside docs/: pages of the repository's root and of its folders, the files that
pages link to, a reference of the modules for which docs/ has none, and the versions to choose from.

Links in the pages are those of the repository; here they are made to lead where things are on the
site.  A link that leads nowhere ends the build (``strict`` in mkdocs.yml).
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "SUPPORT.md": "support.md",
    "benchmarks/README.md": "benchmarks.md",
    "docs/README.md": "pages.md",
    "examples/disaggregated_prefill/README.md": "disaggregated-prefill.md",
}
"""Pages that are elsewhere on the site than in the repository."""
REFERENCE = ("halves", "interfaces")
HANDED_ON = re.compile(r"^from (kvshm\.\S+) import (\w+) as \2$", re.MULTILINE)
SOURCES = "source"
"""Where files that are no pages lie; as .txt, so that browsers show them."""
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
HEADING = re.compile(r"^## (.*)\n+((?:- \[.*\n)+)", re.MULTILINE)
NAMED = re.compile(r"^- \[(.*?)\]\((.*?)\)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make docs/README.md, the map of all pages, the navigation."""
    text = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = PurePosixPath("docs/README.md")
    nav: list[Any] = [{"kvshm": "index.md"}, {"All pages": "pages.md"}]
    for heading, listed in HEADING.findall(text):
        named = [{name: place_of(link, pages)} for name, link in NAMED.findall(listed)]
        nav.append({heading: named})
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("0*.md"))
    nav.append({"Decisions": [f"decisions/{name}" for name in decisions]})
    nav.append({"Reference": [{f"kvshm.{name}": f"reference-{name}.md"} for name in REFERENCE]})
    nav.append({"Disaggregated prefill": "disaggregated-prefill.md"})
    config.nav = nav
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what lies beside docs/, and what pages link to."""
    for path, uri in BESIDE.items():
        if (old := files.get_file_from_path(path.removeprefix("docs/"))) and path[:5] == "docs/":
            files.remove(old)
        files.append(File.generated(config, uri, content=(ROOT / path).read_text("utf-8")))
    for path in linked():
        if (ROOT / path).is_file():
            content = (ROOT / path).read_text("utf-8")
            files.append(File.generated(config, f"{SOURCES}/{path}.txt", content=content))
        else:
            files.append(File.generated(config, f"{SOURCES}/{path}.md", content=listing(path)))
    for name in REFERENCE:
        content = "\n\n".join([f"# kvshm.{name}", *documented(name)])
        files.append(File.generated(config, f"reference-{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    here = home_of(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = place_of(link[1], here)
        return os.path.relpath(target, PurePosixPath(page.file.src_uri).parent) + (link[2] or "")

    return LINK.sub(moved, markdown)


def home_of(uri: str) -> PurePosixPath:
    """Return where a page of the site lies in the repository."""
    homes = {uri: path for path, uri in BESIDE.items()}
    return PurePosixPath(homes.get(uri, f"docs/{uri}"))


def place_of(link: str, page: PurePosixPath) -> str:
    """Return where the target of a link lies on the site.  ``page``: in the repository."""
    path = os.path.normpath(page.parent / link)
    if path in BESIDE:
        return BESIDE[path]
    if (ROOT / path).is_dir():
        return f"{SOURCES}/{path}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{SOURCES}/{path}.txt"


def documented(name: str) -> list[str]:
    """Return the page of a public module: what it says of itself, what it defines, and what it
    hands on."""
    text = (ROOT / "kvshm" / f"{name}.py").read_text("utf-8")
    handed_on = [f"::: {'.'.join(found)}" for found in HANDED_ON.findall(text)]
    about = ast.get_docstring(ast.parse(text)) or ""
    options = "{show_root_heading: false, show_docstring_description: false}"
    own = f"::: kvshm.{name}\n    options: {options}"
    return [f"```\n{about}\n```", own, *handed_on]


def listing(folder: str) -> str:
    """Return a page with all files of a folder."""
    lines = [f"# {folder}\n"]
    for path in sorted(each for each in (ROOT / folder).rglob("*") if each.is_file()):
        lines += [
            f"## {path.relative_to(ROOT / folder)}\n",
            "```",
            path.read_text("utf-8"),
            "```\n",
        ]
    return "\n".join(lines)


def linked() -> set[str]:
    """Return the files and folders of the repository, other than pages, to which its pages link."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / path for path in BESIDE)]
    found = set()
    for page in pages:
        here = PurePosixPath(page.relative_to(ROOT))
        for link, _ in LINK.findall(page.read_text("utf-8")):
            path = os.path.normpath(here.parent / link)
            if place_of(link, here).startswith(SOURCES) and (ROOT / path).exists():
                found.add(path)
    return found
