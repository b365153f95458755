"""What a request asks of kvshm: a mistake is counted and logged, and never means consent."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import given
from hypothesis import strategies as st

from kvshm._base.ids import BlockId, Epoch, Generation
from kvshm._node.receipt import Receipt
from kvshm._shm.statistics import BAD_OPTIONS
from kvshm.config import Share
from kvshm.hooks.vllm import request_options as request_options_module
from kvshm.hooks.vllm.request_options import (
    ANSWERED,
    OPTIONS,
    Mistake,
    Options,
    explain,
    may_share,
    options_of,
)

from .conftest import Lines
from .scheduling import BLOCK_SIZE, Make, prompt


def request(params: Any, extra: Any = None) -> Any:
    return SimpleNamespace(
        kv_transfer_params=params,
        sampling_params=SimpleNamespace(extra_args=extra),
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
        cache_salt=None,
    )


ANSWER = {name: 3 for name in ANSWERED if name != "after"}
RECEIPT = Receipt(Epoch(7), BlockId(17), Generation(3))
UNDERSTOOD: list[tuple[Any, Options]] = [
    (None, Options()),
    ({}, Options()),
    ({"kvshm": {}}, Options()),
    ({"kvshm": {"share": True}}, Options()),
    ({"kvshm": {"share": False}}, Options(share=False)),
    ({"kvshm": {"report": True}}, Options(report=True)),
    ({"kvshm": {"report": True, "share": False}}, Options(share=False, report=True)),
    ({"kvshm": {**ANSWER, "share": False}}, Options(share=False)),
    ({"kvshm": {**ANSWER, "after": str(RECEIPT)}}, Options(after=RECEIPT)),
    ({"kvshm": {"after": None}}, Options()),
    ({"kvshm": {"after": 3}}, Options(mistake=Mistake("after", 3))),
    (
        {"kvshm": {"after": "3", "share": False}},
        Options(share=False, mistake=Mistake("after", "3")),
    ),
    ({"do_remote_prefill": True, "tp_size": 2, "remote_host": "h"}, Options()),
    ({"other": {"share": False, "lease": 3}, "more": {}, "ids": [1, {}, "kvshm"]}, Options()),
]


@pytest.mark.parametrize(("params", "asked"), UNDERSTOOD)
def test_what_is_understood(params: Any, asked: Options) -> None:
    assert options_of(request(params)) == asked
    assert may_share(request(params), Share.ALL) is asked.share


MISTAKES = [
    ({"kvshm": {"share": 10**5000}}, "'share': int is neither true nor false"),
    ({str(n): n for n in range(257)}, "kv_transfer_params has more than 256 keys"),
    ({"share": False}, "'share': False stands beside kvshm, not in it"),
    ({"kvshm": {}, "share": False}, "'share': False stands beside kvshm, not in it"),
    ({"kvshm": {}, "Kvshm": {}}, "'Kvshm': {} is not an option of kvshm; did you mean kvshm?"),
    ({"kvshm.share": True}, "'kvshm.share': True is not an option of kvshm; did you mean kvshm?"),
    ({"KvshmConnector": {}}, "'KvshmConnector': {} is not an option of kvshm; did you mean kvshm?"),
    ({b"kvshm": {}}, "b'kvshm': {} is not an option of kvshm; did you mean kvshm?"),
    ({"kvshm": {"sahre": False}}, "'sahre': False is not an option of kvshm; did you mean share?"),
    ({"kvshm": {"Share": False}}, "'Share': False is not an option of kvshm; did you mean share?"),
    ({"kvshm": {"reprot": 1}}, "'reprot': 1 is not an option of kvshm; did you mean report?"),
    (
        {"kvshm": {"x": [1]}},
        "'x': [1] is not an option of kvshm; there are share, report and after",
    ),
    ({"kvshm": {"aftr": ""}}, "'aftr': '' is not an option of kvshm; did you mean after?"),
    ({"kvshm": {"share": 0}}, "'share': 0 is neither true nor false"),
    ({"kvshm": {"share": "false"}}, "'share': 'false' is neither true nor false"),
    ({"kvshm": {"share": None}}, "'share': None is neither true nor false"),
    ({"kvshm": {"report": 1, "share": True}}, "'report': 1 is neither true nor false"),
    ({"kvshm": False}, "'kvshm': False is not an object"),
    ({"kvshm": None}, "'kvshm': None is not an object"),
    (["kvshm"], "'kv_transfer_params': ['kvshm'] is not an object"),
    (
        {"connectors": {"kvshm": {"share": False}}},
        "'connectors': {'kvshm': {'share': False}} holds what belongs into "
        "kv_transfer_params['kvshm']",
    ),
    (
        {"shm": {"share": False}},
        "'shm': {'share': False} holds what belongs into kv_transfer_params['kvshm']",
    ),
    (
        {"x": {"kvshm": 1, **{str(n): n for n in range(9)}}},
        "'x': {'0': 0, '1': 1, '2': 2, '3': 3, ...} holds what belongs into "
        "kv_transfer_params['kvshm']",
    ),
    (
        {"o": {"KV_SHM": {}}},
        "'o': {'KV_SHM': {}} holds what belongs into kv_transfer_params['kvshm']",
    ),
    (
        {"x": [1, {"kvshm": 0}]},
        "'x': [1, {'kvshm': 0}] holds what belongs into kv_transfer_params['kvshm']",
    ),
    (
        {"kvshmm": {"share": False}},
        "'kvshmm': {'share': False} is not an option of kvshm; did you mean kvshm?",
    ),
    (
        {"KV_SHM": {"share": False}},
        "'KV_SHM': {'share': False} is not an option of kvshm; did you mean kvshm?",
    ),
]


def test_options_beside_kv_transfer_params_are_no_consent() -> None:
    """vLLM hands on what a client sends as ``vllm_xargs``."""
    wrong = request({"kvshm": {"share": True}}, {"kvshm": '{"share": false}', "other": 1})
    asked = options_of(wrong)
    assert not may_share(wrong, Share.ALL)
    assert asked.mistake is not None
    assert explain(asked.mistake) == (
        "'vllm_xargs': {'kvshm': '{\"share\": false}'} holds what belongs into "
        "kv_transfer_params['kvshm']"
    )
    for key in ("kvshm_share", "kvshm.share", "KVSHM", "kv_shm", "kvshmm"):
        assert not may_share(request(None, {key: "no"}), Share.ALL)
    for extra in ({"other": 1}, {"share": 0}, {"kv_transfer_params": {}}, {}, ["kvshm"]):
        assert options_of(request(None, extra)) == Options()  # may be another's, or of no client


@pytest.mark.parametrize(("params", "line"), MISTAKES, ids=[line for _, line in MISTAKES])
def test_a_mistake_is_named_and_is_no_consent(params: Any, line: str) -> None:
    asked = options_of(request(params))
    assert not may_share(request(params), Share.ALL)
    assert asked.mistake is not None
    assert explain(asked.mistake) == line


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
OWN = st.dictionaries(st.sampled_from((*OPTIONS, *ANSWERED)) | st.text(), st.booleans() | JSON)


@given(st.none() | JSON | st.dictionaries(st.just("kvshm") | st.text(), OWN | JSON))
def test_whatever_clients_send_is_shared_only_if_it_is_understood(params: Any) -> None:
    asked = options_of(request(params))
    own = params.get("kvshm", {}) if isinstance(params, dict) else {}
    if asked.share:
        assert asked.mistake is None or asked.mistake.option == "after"
        assert isinstance(own, dict)
        assert own.get("share", True) is True
        assert set(own) <= {*OPTIONS, *ANSWERED}
    if asked.mistake is not None:
        line = explain(asked.mistake)
        assert "\n" not in line
        assert len(line) < 200


def test_a_mistake_counts_once_a_request_and_is_logged_once_a_minute(
    engine: Make, lines: Lines
) -> None:
    e = engine(max_num_batched_tokens=40, max_num_seqs=4)
    mistyped = {"kv_transfer_params": {"kvshm": {"sahre": False}}}
    for name in ("a", "b", "c"):
        first, asked = (1, mistyped) if name != "c" else (700, None)
        e.add(name, prompt(4, first=first), max_tokens=2, extra_args=asked)
        while name in e.scheduler.requests:
            assert name == "c" or not e.ready()
            e.step()
    assert e.table.counters.read(BAD_OPTIONS) == 2
    said = [line for line in lines if "request not shared" in line]
    assert said == [
        "kvshm: request not shared: 'sahre': False is not an option of kvshm; did you mean share?"
    ]
    assert e.ready()


def test_an_option_beside_them_in_a_sessions_first_input_is_counted_once(engine: Make) -> None:
    e = engine()
    e.add("s", prompt(2), max_tokens=1, extra_args={"kvshm.share": "no"}, resumable=True)
    for _ in range(2):
        e.step()
    e.continue_session("s", prompt(2, first=700), max_tokens=1)
    for _ in range(3):
        e.step()
    assert e.table.counters.read(BAD_OPTIONS) == 1
    assert not e.ready()


@pytest.mark.parametrize(
    ("first", "later", "bad"),
    [
        (None, {"share": False}, 0),
        ({"report": True}, {"sahre": False}, 1),
        ({"share": False}, None, 0),
    ],
)
def test_an_input_of_a_session_that_is_not_to_be_shared_ends_sharing_for_the_rest(
    engine: Make, first: Any, later: Any, bad: int
) -> None:
    def asking(own: Any) -> dict[str, Any] | None:
        return own and {"kv_transfer_params": {"kvshm": own, "other": 1}}

    e = engine()
    e.add("s", prompt(2), max_tokens=1, extra_args=asking(first), resumable=True)
    e.step()
    e.step()
    shared = len(e.ready())
    assert bool(shared) is (first != {"share": False})
    for start, asked in ((700, later), (900, None)):  # the one after it says nothing
        e.continue_session("s", prompt(2, first=start), max_tokens=1, extra_args=asking(asked))
        for _ in range(3):
            e.step()
    session = e.scheduler.requests["s"]
    assert session.num_computed_tokens >= 6 * BLOCK_SIZE
    assert len(e.ready()) == shared
    assert e.table.counters.read(BAD_OPTIONS) == bad
    assert options_of(session).report is bool(first and first.get("report"))
    e.add("r", prompt(2, first=5000), max_tokens=1)  # others go on sharing
    e.step()
    e.step()
    assert len(e.ready()) > shared


def test_an_input_of_a_session_that_says_nothing_is_shared(engine: Make) -> None:
    e = engine()
    e.add("s", prompt(2), max_tokens=1, resumable=True)
    e.step()
    e.continue_session("s", prompt(2, first=700), max_tokens=1)
    for _ in range(3):
        e.step()
    assert len(e.ready()) == 4


def test_many_odd_keys_cost_little_when_they_come_again() -> None:
    odd = [{"".join(p) + str(n): 1 for p in permutations("mhsv")} for n in range(40)]
    for params in odd:
        options_of(request(params))
    before = request_options_module._means_kvshm.cache_info().misses
    for params in odd:
        options_of(request(params))
    assert request_options_module._means_kvshm.cache_info().misses == before
