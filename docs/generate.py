"""Write the parts of these pages that the code states: the settings, from kvshm/config.py, and
the fingerprint's fields, from kvshm/fingerprint.py.

    make docs

They stand between two comments, ``<!-- name -->`` and ``<!-- end of name -->``; the rest of a
page is written by hand.  A test holds the committed page against what this gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvshm import syncpoints, timing
from kvshm.config import SETTINGS, Setting
from kvshm.fingerprint import FIELDS

CONFIGURATION = Path(__file__).with_name("configuration.md")
FINGERPRINT = Path(__file__).with_name("fingerprint.md")
HEAD = ("setting", "accepts", "default", "what it does")
SYNC_POINT = (
    f"`{syncpoints.VARIABLE}`",
    "`<name>:<stop or kill>[:<nth>]`",
    "unset",
    "Stop or kill the process at a sync point (`kvshm/syncpoints.py`).",
)
TIME_SCALE = (
    f"`{timing.VARIABLE}`",
    "a number above 0",
    "1",
    "Multiply all times that coordinator and engines wait for each other (`kvshm/timing.py`).",
)
"""Both are read before there are settings, and set by tests only."""


def configuration(page: str) -> str:
    """Return the page with the settings that the code has."""
    everybody = [_cells(setting) for setting in SETTINGS if not setting.for_tests]
    tests = [_cells(setting) for setting in SETTINGS if setting.for_tests]
    page = replaced(page, "settings", _table(everybody))
    return replaced(page, "settings for tests", _table([*tests, SYNC_POINT, TIME_SCALE]))


def fingerprint(page: str) -> str:
    """Return the page with the fields that the code has."""
    rows = [(f"`{name}`", reason) for name, reason in FIELDS.items()]
    return replaced(page, "fields", _table(rows, ("field", "why it counts")))


def replaced(page: str, name: str, part: str) -> str:
    """Return the page with another part of that name.  Raises ValueError if there is not
    exactly one."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return before + begin + part + end + after


def _cells(setting: Setting) -> tuple[str, ...]:
    plain = str(int(setting.default) if isinstance(setting.default, bool) else setting.default)
    default = "unset" if setting.default in (None, "") else plain
    return f"`{setting.name}`", setting.accepts, default, setting.sentence


def _table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...] = HEAD) -> str:
    lines = [" | ".join(cells) for cells in (head, *rows)]
    lines = [f"| {line} |" for line in lines]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:], ""])


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration(CONFIGURATION.read_text("utf-8")), "utf-8")
    FINGERPRINT.write_text(fingerprint(FINGERPRINT.read_text("utf-8")), "utf-8")
