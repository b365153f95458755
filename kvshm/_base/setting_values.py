"""What the values of settings may be: each parser returns the value of a text, or raises ValueError
or KeyError.  Also turns what a program, TOML or JSON gives for a value into such text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

_BOOLEANS = {"0": False, "no": False, "false": False, "off": False}
_BOOLEANS |= {"1": True, "yes": True, "true": True, "on": True}
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def boolean(text: str) -> bool:
    """0 or 1, or a word for it."""
    return _BOOLEANS[text.lower()]


def whole_number(least: int) -> Callable[[str], int]:

    def parse(text: str) -> int:
        # int() also accepts blanks, signs, underscores and digits of other scripts.
        if not re.fullmatch("[0-9]+", text) or (number := int(text)) < least:
            raise ValueError
        return number

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """Return the parser of numbers from ``least`` to ``most``."""

    def parse(text: str) -> float:
        # float() also accepts blanks, underscores, digits of other scripts, nan and inf.
        if not re.fullmatch("[0-9.eE+-]+", text) or not least <= (number := float(text)) <= most:
            raise ValueError
        return number

    return parse


def method_names(text: str) -> str:
    """Names of Python methods, separated by commas, with or without blanks."""
    names = [name.strip() for name in text.split(",")]
    if not all(map(str.isidentifier, names)):
        raise ValueError
    return ",".join(names)


def namespace(text: str) -> str:
    """A name that can be part of the name of a file."""
    if not re.fullmatch(r"[a-z0-9_-]{1,32}", text):
        raise ValueError
    return text


def absolute_path(text: str) -> str:
    """A path from the root, in its shortest form."""
    if not text.startswith("/") or not text.isprintable():
        raise ValueError
    return os.path.normpath(text)


def transport(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text):
        raise ValueError
    return text


def log_level(text: str) -> str:
    return _LEVELS[_LEVELS.index(text.upper())]


def spelled(value: object) -> str:
    """Return a value as a variable would have it.  ValueError: more digits than Python writes."""
    if isinstance(value, bool):
        return str(int(value))
    return str.__str__(value) if isinstance(value, str) else str(value)


def spelled_native(value: object, *, switch: bool) -> str:
    """Return a value of TOML or JSON as a variable would have it.  ``switch``: whether the setting
    is on or off, so that true and false make sense.  Raises ValueError for any other type."""
    if not isinstance(value, str | int | float) or (isinstance(value, bool) and not switch):
        raise ValueError
    return spelled(value)


def as_text(value: object) -> str:
    """Return a checked value as people read it, "unset" if there is none."""
    return "unset" if value in (None, "") else spelled(value)
