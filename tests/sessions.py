"""Namespaces that tell one session of these tests from another on the same machine."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Collection

from kvshm.errors import SegmentError
from kvshm.segment import SegmentName, is_alive, list_segments, owner_of

MARK = os.environ.setdefault("TESTS_OF_KVSHM", uuid.uuid4().hex[:6])
"""Of this session; its children inherit it."""


def new_namespace() -> str:
    return f"t{MARK}-{uuid.uuid4().hex[:8]}"


def is_anothers(namespace: str) -> bool:
    """Whether another session of these tests made it: what is left there is not ours."""
    found = re.fullmatch("t([0-9a-f]{6})-[0-9a-f]{8}", namespace)
    return found is not None and found[1] != MARK


def _in_use_elsewhere(segment: SegmentName) -> bool:
    """Whether a living process other than this one owns the segment: somebody else may well
    run kvshm on this machine while its tests run."""
    try:
        owner = owner_of(str(segment))
    except SegmentError:
        return False
    return owner.pid != os.getpid() and is_alive(owner)


def new_and_nobodys(before: Collection[SegmentName]) -> set[SegmentName]:
    """What this session may have left: segments that are new since ``before``, without those in
    use elsewhere and those of other sessions."""
    now = [segment for segment in list_segments() if not is_anothers(segment.namespace)]
    busy = {segment.namespace for segment in now if _in_use_elsewhere(segment)}
    return {s for s in now if s not in before and s.namespace not in busy}
