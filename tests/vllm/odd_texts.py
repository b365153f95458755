"""Texts that clients may choose: whatever kvshm does with one, it must not read it."""

from __future__ import annotations

import random
from typing import Any

MEGABYTE = 1 << 20

TEXTS = {
    "empty": "",
    "NUL": "\0",
    "NUL inside": "a\0b",
    "NUL and a number": "job\x007",
    "two NULs": "job\x007\x000",
    "number": "7",
    "prefix of another": "a",
    "newline": "a\nINFO kvshm: all is well",
    "terminal": "\x1b]0;kvshm\x07\x1b[2J\x1b[31ma\x9b31m",
    "formats": "%s %(name)s %d {0} {name} {",
    "path": "../../../etc/passwd",
    "names of kvshm's": "kvshm.engine.0000000000000001.sock",
    "other letters": "\u6a21\u578b \U0001f600 \u202e\u2028",
    "megabyte": "x" * MEGABYTE,
}

HALVES = {"half of a character": "a\ud800", "other half": "\udcff"}
"""Lone surrogates, which JSON may hold and UTF-8 may not."""

UNDERSTOOD: dict[str, Any] = {
    "nothing": {},
    "other connectors'": {"do_remote_prefill": True, "remote_block_ids": [[1], None]},
    "another's depth": {"other": [[[[[[[[{}]]]]]]]]},
    "report": {"kvshm": {"report": True}},
    "empty name": {"": "\0", "\n": [], "\x1b[31m": "%s{}"},
}
MISTAKEN: dict[str, Any] = {
    "texts": {text[:100]: text for text in TEXTS.values()},
    "numbers": {"kvshm": 7, "": 1e308, "n": -(2**63), "m": 2**64 - 1},
    "lists": {"kvshm": [[], [[]], None], "a": [{"kvshm": {}}] * 40},
    "wrong options": {"kvshm": {"share": "\0", "report": "\x1b[31m", "\n": 1}},
    "deep": {"kvshm": {"share": [[[[[[[[{}]]]]]]]]}},
    "many": {str(number): number for number in range(1000)},
    "true": {"kvshm": True},
    "null": {"kvshm": None},
}
"""What may stand in ``kv_transfer_params``: what kvshm takes for no refusal to share, and what it
does not understand."""


def any_json(rnd: random.Random, depth: int = 3) -> Any:
    """Whatever JSON may hold that vLLM takes."""
    texts = (*TEXTS.values(), *HALVES.values(), "kvshm", "share", "report")
    kind = rnd.randrange(8 if depth else 6)
    if kind == 6:
        return [any_json(rnd, depth - 1) for _ in range(rnd.randrange(4))]
    if kind == 7:
        return any_object(rnd, depth - 1)
    numbers = (rnd.randint(-(2**63), 2**64 - 1), rnd.uniform(-1e9, 1e9))
    return (None, True, False, *numbers, rnd.choice(texts))[kind]


def any_object(rnd: random.Random, depth: int = 3) -> dict[str, Any]:
    """Whatever a JSON object may hold."""
    keys = (*TEXTS.values(), *HALVES.values(), "kvshm", "share", "do_remote_prefill")
    return {rnd.choice(keys): any_json(rnd, depth) for _ in range(rnd.randrange(4))}
