"""Namespaces that no other session of these tests has, on the same machine or not."""

from __future__ import annotations

import uuid


def new_namespace() -> str:
    return f"t{uuid.uuid4().hex[:14]}"
