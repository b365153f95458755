"""docs/configuration.md says what config.py says, setting by setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshm.config import SETTINGS, Setting
from kvshm.syncpoints import VARIABLE

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAGE.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4
    and cells[0].startswith("`KVSHM_")
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_page_describes_each_setting(setting: Setting) -> None:
    accepts, default, sentence = ROWS[setting.name]
    assert (accepts, sentence) == (setting.accepts, setting.sentence)
    plain = str(int(setting.default) if isinstance(setting.default, bool) else setting.default)
    assert default == ("unset" if setting.default in (None, "") else plain)


def test_page_names_no_setting_that_does_not_exist() -> None:
    assert ROWS.keys() == {setting.name for setting in SETTINGS} | {VARIABLE}
