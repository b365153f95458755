"""How the bytes of a block can be read as numbers."""

from __future__ import annotations

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}
"""Each format, and how many bytes a number has.  uint8: bytes, which are only equal or not."""


def dtype_of(fields: dict[str, str]) -> str:
    """The format of a cache by its fingerprint's fields; uint8 if it is not read here."""
    stated = fields.get("kv_dtype", "auto")
    name = fields.get("dtype", "") if stated == "auto" else stated
    name = name.removeprefix("torch.")
    return name if name in DTYPES else "uint8"
