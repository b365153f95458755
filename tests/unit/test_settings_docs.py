"""docs/configuration.md and docs/fingerprint.md are what docs/generate.py makes of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from kvshm._base import syncpoints, timing
from kvshm._base.fingerprint import FIELDS
from kvshm._base.setting_sources import FILE_VARIABLE
from kvshm.config import SETTINGS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "configuration.md").read_text("utf-8")


@pytest.fixture
def generator() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


def test_the_committed_page_is_the_generated_one(generator: dict[str, Any]) -> None:
    assert generator["configuration"](PAGE) == PAGE, "make docs"


def test_the_page_of_the_fingerprint_has_each_field_and_its_reason(
    generator: dict[str, Any],
) -> None:
    page = (DOCS / "fingerprint.md").read_text("utf-8")
    assert generator["fingerprint"](page) == page, "make docs"
    assert re.findall(r"^\| `(\w+)` \| \w.*\. \|$", page, re.MULTILINE) == list(FIELDS)


def test_each_setting_has_its_row(generator: dict[str, Any]) -> None:
    emptied = generator["replaced"](PAGE, "settings", "")
    emptied = generator["replaced"](emptied, "settings for tests", "")
    assert not re.findall(r"^\| `KVSHM_", emptied, re.MULTILINE)
    written = re.findall(r"^\| `(KVSHM_\w+)`", generator["configuration"](emptied), re.MULTILINE)
    elsewhere = (FILE_VARIABLE, syncpoints.VARIABLE, timing.VARIABLE)
    assert sorted(written) == sorted([*(setting.name for setting in SETTINGS), *elsewhere])
