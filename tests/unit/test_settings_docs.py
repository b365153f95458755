"""docs/configuration.md is what docs/generate.py makes of it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from kvshm.config import SETTINGS
from kvshm.syncpoints import VARIABLE

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "configuration.md").read_text("utf-8")


@pytest.fixture
def generator() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


def test_the_committed_page_is_the_generated_one(generator: dict[str, Any]) -> None:
    assert generator["configuration"](PAGE) == PAGE, "make docs"


def test_each_setting_has_its_row(generator: dict[str, Any]) -> None:
    emptied = generator["replaced"](PAGE, "settings", "")
    emptied = generator["replaced"](emptied, "settings for tests", "")
    assert not re.findall(r"^\| `KVSHM_", emptied, re.MULTILINE)
    written = re.findall(r"^\| `(KVSHM_\w+)`", generator["configuration"](emptied), re.MULTILINE)
    assert sorted(written) == sorted([*(setting.name for setting in SETTINGS), VARIABLE])
