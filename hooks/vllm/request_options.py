"""What a request asks of kvshm, and which requests may share their blocks.

A client asks with ``kv_transfer_params={"kvshm": {"share": false, "report": true}}``.  A request
with an unknown option is not shared: its client may have meant ``share: false``.  A receipt that
cannot be read is only ignored: programs write it, and nothing is waited for then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from reprlib import repr as short
from typing import Any, NamedTuple

from kvshm._base.log import LogLimit, logger
from kvshm.config import Share
from kvshm.halves import BAD_OPTIONS, Receipt, SchedulerHalf

from ..log_lines import HookLine

log = logger(__name__)

ALL, KVSHM = "kv_transfer_params", "kvshm"
"""The dict in which all connectors find their options, and kvshm's key in it."""
EXTRA = "vllm_xargs"
"""vLLM's field for extra arguments, in which kvshm has no options."""
MOST_KEYS = 256
"""In that dict; all are looked at."""
MOST_LISTED, MOST_LOOKED_THROUGH = 16, 64
"""Of a list in it, and of all lists together."""
OPTIONS = ("share", "report")
"""Both are true or false."""
AFTER = "after"
"""A receipt, in an answer and in the next engine's request."""
ANSWERED = ("prompt_tokens", "local_tokens", "peer_tokens", "computed_tokens", "peers", AFTER)
"""Further keys of kvshm's answers, which routers send on as the next request's options."""


class Mistake(NamedTuple):
    """An option that cannot be understood."""

    option: object
    value: object


class Options(NamedTuple):
    """What a request asks."""

    share: bool = True
    report: bool = False  # where the prompt's tokens came from, in the answer
    mistake: Mistake | None = None
    """What cannot be understood; then ``share`` is false, unless it is the receipt."""
    after: Receipt | None = None  # what this engine has to have heard of before it looks it up


_NOTHING_ASKED = Options()


def options_of(request: Any) -> Options:
    """What the request's ``kv_transfer_params`` ask."""
    sampling = request.sampling_params  # None: of a pooling model
    return _asked(request.kv_transfer_params, sampling.extra_args if sampling else None)


def is_handed_over(params: object) -> bool:
    """Whether the proxy says that another engine goes on with the request, as vLLM's proxies for
    disaggregated prefill do: it passes on what the answer has in ``kv_transfer_params``."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def _asked(params: object, extra: dict[str, Any] | None) -> Options:
    """``extra``: the request's other arguments."""
    if isinstance(extra, dict) and len(extra) > (ALL in extra):
        for key in islice(extra, MOST_KEYS):
            if key != ALL and (key == KVSHM or _names_kvshm(_text(key))):
                return _refused(EXTRA, {key: extra[key]})
    return _NOTHING_ASKED if params is None else options_in(params)


def options_in(params: object) -> Options:
    """What these ``kv_transfer_params`` ask; clients may put anything there."""
    if not isinstance(params, dict) or len(params) > MOST_KEYS:
        return Options(share=False, mistake=Mistake(ALL, params))
    for key, value in params.items():
        if key != KVSHM and (_means_kvshm(_text(key)) or _holds_options(value)):
            return _refused(key, value)
    for key, item in islice(_listed(params), MOST_LOOKED_THROUGH):
        if _holds_options(item):
            return _refused(key, params[key])
    return _read(params[KVSHM]) if KVSHM in params else _NOTHING_ASKED


def _read(own: object) -> Options:
    if not isinstance(own, dict):
        return _refused(KVSHM, own)
    for option, value in own.items():
        if option not in ANSWERED and (option not in OPTIONS or not isinstance(value, bool)):
            return _refused(option, value)
    after = Receipt.read(text := own.get(AFTER))
    mistake = Mistake(AFTER, text) if text is not None and after is None else None
    return Options(own.get("share", True), own.get("report", False), mistake, after)


def _holds_options(value: object) -> bool:
    """Whether kvshm's options stand one level too deep, or below another name."""
    if not isinstance(value, dict):
        return False
    if len(value) > len(OPTIONS) + len(ANSWERED):
        return KVSHM in value  # another connector's: not looked through
    if any(key == KVSHM or _names_kvshm(_text(key)) for key in value):
        return True
    return any(option in value for option in OPTIONS) and all(
        key in OPTIONS or key in ANSWERED for key in value
    )


def _listed(params: dict[Any, Any]) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """The dicts in lists: ``{"connectors": [{"kvshm": ...}]}``.  Lists of numbers may be long."""
    for key, value in params.items():
        for item in value[:MOST_LISTED] if isinstance(value, list) else ():
            if isinstance(item, dict):
                yield key, item


def _refused(option: object, value: object) -> Options:
    return Options(share=False, mistake=Mistake(option, value))


def may_share(request: Any, share: Share) -> bool:
    """Whether this request's client, and the operator, have its blocks shared."""
    if share is Share.SALTED_ONLY and not request.cache_salt:  # vLLM's hash leaves an empty one out
        return False
    return options_of(request).share


class OptionChecks:
    """Counts requests whose options cannot be understood, and logs one a minute."""

    def __init__(self, cache: SchedulerHalf, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._log_limit = LogLimit(clock=clock)

    def check(self, request: Any) -> None:
        """Check a request that has arrived.  Of a session only what vLLM keeps: ``step_built``
        checks each input's ``vllm_xargs``."""
        if request.resumable:
            self._report(_asked(request.kv_transfer_params, None).mistake)
        else:
            self._report(options_of(request).mistake)

    def step_built(self, new: Sequence[Any], requests: Mapping[str, Any]) -> None:
        """Check the inputs of sessions in a step that is about to be dispatched.  ``new``: what
        vLLM sends its workers (NewRequestData); ``requests``: vLLM's, by id."""
        for scheduled in new:
            if (request := requests[scheduled.req_id]).resumable:
                self._input_begins(request)

    def _input_begins(self, session: Any) -> None:
        """Stop sharing a session with an input that is not to be shared: its tokens stand in all
        that follows.  vLLM keeps the first input's options, and the newest ``sampling_params``."""
        extra = session.sampling_params.extra_args or {}
        before = _asked(session.kv_transfer_params, None)
        if not before.share:
            return
        asked = _asked(extra.get(ALL), extra)
        self._report(asked.mistake)
        if not asked.share:
            own = {"share": False, "report": before.report}
            session.kv_transfer_params = {**(session.kv_transfer_params or {}), KVSHM: own}

    def _report(self, mistake: Mistake | None) -> None:
        if mistake is None:
            return
        self._cache.count(BAD_OPTIONS)
        line = HookLine.BAD_RECEIPT if mistake.option == AFTER else HookLine.BAD_OPTION
        if self._log_limit.allows(line):
            log.line(line, explain(mistake))


def explain(mistake: Mistake) -> str:
    """Return what to log of a mistake: option, value and remedy."""
    option, value = mistake
    shown = f"{_shown(option)}: {_shown(value)}"
    if option in OPTIONS and isinstance(value, bool):
        return f"{shown} stands beside {KVSHM}, not in it"
    if option in OPTIONS:
        return f"{shown} is neither true nor false"
    if option == AFTER:
        return f"{shown} is not what an answer has there"
    if option == ALL and isinstance(value, dict):
        return f"{option} has more than {MOST_KEYS} keys"
    if option in (KVSHM, ALL):
        return f"{shown} is not an object"
    listed = [item for _, item in _listed({option: value})]
    if not _means_kvshm(_text(option)) and any(map(_holds_options, (value, *listed))):
        return f"{shown} holds what belongs into {ALL}[{KVSHM!r}]"
    known = (*OPTIONS, AFTER, KVSHM)
    nearest = KVSHM if KVSHM in _letters(option) else _nearest(option, known, 0.6)
    there_are = f"there are {', '.join(OPTIONS)} and {AFTER}"
    remedy = f"did you mean {nearest}?" if nearest else there_are
    return f"{shown} is not an option of kvshm; {remedy}"


def _text(key: object) -> str:
    """The beginning of a key; empty if it is no text."""
    return str(key[:100]) if isinstance(key, str | bytes) else ""


@lru_cache(maxsize=16 * MOST_KEYS)  # else a few odd requests in turns cost milliseconds each
def _means_kvshm(key: str) -> bool:
    """Whether a key was meant to be kvshm's, or one of its options."""
    return _names_kvshm(key) or _letters(key) in OPTIONS


@lru_cache(maxsize=16 * MOST_KEYS)
def _names_kvshm(key: str) -> bool:
    """Whether a key is kvshm's, however it is written."""
    if KVSHM in _letters(key):
        return True
    # Four letters in common are what the cutoff needs; the comparison itself takes some 20 us.
    alike = 4 <= len(key) <= 7 and len(set(KVSHM) & set(key.lower())) >= 4
    return alike and _nearest(key, (KVSHM,), 0.75) is not None


def _shown(value: object) -> str:
    try:
        return f"{short(value):.80}"
    except ValueError:  # of a number with thousands of digits
        return type(value).__name__


def _letters(text: object) -> str:
    return "".join(filter(str.isalnum, str(text)[:100])).lower()


def _nearest(text: object, known: tuple[str, ...], cutoff: float) -> str | None:
    from difflib import get_close_matches  # only needed for a mistake

    found = get_close_matches(str(text)[:20].lower(), known, n=1, cutoff=cutoff)
    return found[0] if found else None
