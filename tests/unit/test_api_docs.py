"""docs/api.md is what docs/generate.py makes of the public surface, and leaves nothing out."""

from __future__ import annotations

import inspect
import re
import runpy
from typing import Any

import api_page

import kvshm
from kvshm.config import SETTINGS

from .pages import ROOT

PAGE = (ROOT / "docs/api.md").read_text("utf-8")
CLASSES = [name for name in kvshm.__all__ if inspect.isclass(getattr(kvshm, name))]


def test_the_committed_page_is_the_generated_one() -> None:
    generator: dict[str, Any] = runpy.run_path(str(ROOT / "docs/generate.py"))
    assert generator["api"](PAGE) == PAGE, "make docs"


def test_every_name_of_the_surface_has_its_section() -> None:
    assert sorted(re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE)) == sorted(kvshm.__all__)


def missing(name: str) -> set[str]:
    """The public members of a class that its section does not show, but for internal ones and
    settings: docs/configuration.md lists these members of Config."""
    section = PAGE.partition(f"\n### `{name}`\n")[2]
    section = re.split(r"^##?#? ", section, flags=re.MULTILINE)[0]
    shown = {*re.findall(rf"^#### `{name}\.(\w+)`", section, re.MULTILINE)}
    shown |= {*re.findall(r"^- `(\w+)", section, re.MULTILINE)}
    classes = [
        base for base in getattr(kvshm, name).__mro__ if base.__module__.startswith("kvshm.")
    ]
    own = {member for base in classes for member in vars(base) if not member.startswith("_")}
    internal = {m.name for m in api_page.surface()[name].members if m.text.startswith("Internal")}
    settings = {setting.field for setting in SETTINGS} if name == "Config" else set()
    return own - shown ^ (internal & own | settings)


def test_every_public_member_stands_in_its_section() -> None:
    assert len(CLASSES) > 10
    assert {name: missing(name) for name in CLASSES if missing(name)} == {}
