"""Methods of a transport besides those of Transport (kvshm.interfaces.load_transport)."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvshm._base.core_lines import CoreLine
from kvshm._base.log import logger

log = logger(__name__)


class Called(NamedTuple):
    """How a call went."""

    worked: bool
    result: Any = None


def call_optional(owner: object, name: str, *arguments: object) -> Called:
    """Call a method of a transport, or of its copies, that it need not have.  Never raises: nothing
    that depends on such a method is needed for a load."""
    try:
        if (method := getattr(owner, name, None)) is None:
            return Called(worked=False)
        return Called(worked=True, result=method(*arguments))
    except Exception:  # any, of a transport: it does without
        log.line(CoreLine.OPTIONAL_CALL_FAILED, name, exc_info=True)
        return Called(worked=False)
