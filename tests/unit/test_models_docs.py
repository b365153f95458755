"""The page on models names tests that exist, and every family that is tested."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/models.md").read_text()
FAMILIES = (ROOT / "tests/vllm/families.py").read_text()
DRAFTERS = (ROOT / "tests/vllm/drafters.py").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?`", PAGE)))


def test_the_tests_that_the_page_names_exist() -> None:
    assert NAMED
    for file, test, family in NAMED:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), test
        if file.endswith("test_drafters.py"):  # family-method
            family, _, method = family.partition("-")
            assert f'"{method}"' in DRAFTERS
        assert not family or f'Family("{family}"' in FAMILIES
