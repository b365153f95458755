"""docs/README.md, the map of the pages by reader, lists each page once; README's first screen and
its sizes are right."""

from __future__ import annotations

import re
import subprocess
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


def test_the_first_screen_of_the_readme_says_what_ran_on_gpus_and_starts_two_engines() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()[:40]
    first_paragraph = "\n".join(lines[2:]).split("\n\n")[0]
    assert "On a GPU it has run for half an hour" in first_paragraph
    assert sum(line.startswith("- **") for line in lines) == 5
    started = [line for line in lines if re.match(r" +python -m vllm\..* --port \d+ &$", line)]
    assert len(started) == 2
    assert {"    pip install ./kvshm", "    kvshm-coordinator &"} < {*lines}


def test_the_readmes_sizes_are_right_to_a_tenth() -> None:
    rows = re.findall(r"^\| `(\w+)/` \| ([\d,]+) \|", (ROOT / "README.md").read_text(), re.M)
    assert [name for name, _ in rows][:5] == ["kvshm", "coordinator", "transport", "hooks", "tools"]
    for folder, lines in rows:
        listed = subprocess.run(
            ["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.split()
        files = [ROOT / name for name in listed if re.search(r"\.(py|c|h)$", name)]
        counted = sum(path.read_bytes().count(b"\n") for path in files)
        assert abs(counted / int(lines.replace(",", "")) - 1) < 0.1, f"{folder}: {counted}"


def test_every_decision_is_in_the_list_of_decisions_once() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d{4}-[^)]+\.md)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.glob("0*.md"))
