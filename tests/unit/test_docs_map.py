"""docs/README.md, the map of the pages by reader, lists each page once; README's first screen and
its sizes are right."""

from __future__ import annotations

import re
from collections import Counter

from .pages import PAGES, ROOT

MAP = ROOT / "docs" / "README.md"
LISTED_BY_THEIR_FOLDER = {ROOT / "docs" / "decisions"}


def test_the_map_lists_every_page_once() -> None:
    links = re.findall(r"\]\(([^):#\s]+\.md)", "\n".join(MAP.read_text().splitlines()[4:]))
    listed = Counter((MAP.parent / link).resolve() for link in links)
    expected = [
        page
        for page in PAGES
        if page not in (MAP, ROOT / "README.md")
        and (page.name == "README.md" or page.parent not in LISTED_BY_THEIR_FOLDER)
    ]
    assert listed == Counter(expected)


def test_the_readme_leads_to_the_map() -> None:
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


def test_every_decision_is_in_the_list_of_decisions_once() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d{4}-[^)]+\.md)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.glob("0*.md"))
