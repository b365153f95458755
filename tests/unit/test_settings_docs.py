"""The tables of docs/configuration.md are those that config.py gives, line for line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvshm.config import SETTINGS, Setting
from kvshm.syncpoints import VARIABLE

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
HEAD = "| setting | accepts | default | what it does |\n|---|---|---|---|\n"


def row(setting: Setting) -> str:
    """Return a setting's line of the page."""
    plain = str(int(setting.default) if isinstance(setting.default, bool) else setting.default)
    default = "unset" if setting.default in (None, "") else plain
    return f"| `{setting.name}` | {setting.accepts} | {default} | {setting.sentence} |\n"


@pytest.mark.parametrize("for_tests", [False, True], ids=["for everybody", "for tests"])
def test_page_holds_the_table_that_the_code_gives(for_tests: bool) -> None:
    rows = [row(setting) for setting in SETTINGS if setting.for_tests == for_tests]
    assert HEAD + "".join(rows) in PAGE


def test_page_names_no_setting_that_does_not_exist() -> None:
    named = re.findall(r"^\| `(KVSHM_\w+)`", PAGE, re.MULTILINE)
    assert sorted(named) == sorted([*(setting.name for setting in SETTINGS), VARIABLE])
