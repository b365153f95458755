"""Numbers and names as ``kvshm top`` shows them.  Pure."""

from __future__ import annotations

UNKNOWN = "-"


def number(value: float | None) -> str:
    """A number in at most four characters: ``999``, ``1.2k``, ``48k``, ``3.1M``."""
    return UNKNOWN if value is None else _scaled(value, ("", "k", "M", "G", "T"))


def rate(value: float | None) -> str:
    """Bytes a second: ``3.1 GB/s``."""
    if value is None:
        return UNKNOWN
    text = _scaled(value, (" ", " k", " M", " G", " T"))
    return f"{text}B/s"


def percent(share: float | None) -> str:
    """A share of 0 to 1: ``71.4``."""
    return UNKNOWN if share is None else f"{share * 100:.1f}"


def duration(nanoseconds: float | None) -> str:
    """A time: ``0``, ``41 us``, ``1.3 ms``, ``12 s``."""
    if nanoseconds is None:
        return UNKNOWN
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{_short(nanoseconds / size)} {unit}"
    return f"{nanoseconds:.0f} ns" if nanoseconds else "0"


def age(seconds: float) -> str:
    """How long ago something was: ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < 999.5:
            return f"{_short(value) if value < 99.95 and unit.strip() else f'{value:.0f}'}{unit}"
        value /= 1000
    return f"{_short(value)}{units[-1]}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
