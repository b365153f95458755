"""Texts of other processes, made harmless for a terminal.  Pure."""

from __future__ import annotations

import unicodedata
from typing import Any


def clean(text: str) -> str:
    """Return a text of another process without anything that a terminal could obey or that hides
    or reorders what stands beside it: control and format characters become ``?``."""
    if text.isprintable():
        return text
    return "".join(
        "?" if unicodedata.category(char)[0] == "C" or unicodedata.category(char) in ("Zl", "Zp")
        else char
        for char in text
    )  # fmt: skip


def cleaned(value: Any) -> Any:
    """Return plain data with every text in it clean, keys too."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned(each) for key, each in value.items()}
    return [cleaned(each) for each in value] if isinstance(value, list | tuple) else value
