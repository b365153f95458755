"""Calls methods that a transport need not have: those of ``Supports...`` in kvshm.interfaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from kvshm._base.core_lines import CoreLine
from kvshm._base.log import logger

log = logger(__name__)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Called(NamedTuple, Generic[_Result]):
    """How a call went."""

    worked: bool
    result: _Result | None = None


def call_optional(
    owner: object,
    method: Callable[Concatenate[Any, _Arguments], _Result],
    *arguments: _Arguments.args,
    **named: _Arguments.kwargs,
) -> Called[_Result]:
    """Call ``method`` by its name on ``owner``, which need not have it.  Never raises."""
    name = method.__name__
    try:
        if (own := getattr(owner, name, None)) is None:
            return Called(worked=False)
        return Called(worked=True, result=own(*arguments, **named))
    except Exception:  # any, of a transport: it does without
        log.line(CoreLine.OPTIONAL_CALL_FAILED, name, exc_info=True)
        return Called(worked=False)
