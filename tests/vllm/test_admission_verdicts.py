"""What follows from what vLLM's source says: whether an engine shares, and what it logs.  No
engine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import vllm

from kvshm.hooks.vllm.admission import (
    Difference,
    Examined,
    admit,
    decide,
    known_sources,
    minors,
)

from .conftest import Lines
from .odd_vllm import FILE, TOO_OLD, UNTESTED, dotted

TESTED: list[str] = known_sources()["versions"]
DIFFERENT = Difference(FILE, "BlockPool.touch", ("a-fact", "another"))
GONE = Difference(FILE, "", ("a-fact",))
EXACT = [tuple(map(int, version.split("."))) for version in TESTED]
UNSEEN = (logging.INFO, "is not among the tested")


def test_what_follows(subtests: pytest.Subtests) -> None:
    for version, found, refusal, notice in [
        # as tested
        *((exact, Examined(), None, None) for exact in EXACT),
        ((*EXACT[0], "cpu"), Examined(), None, None),
        *(((*minor, 7), Examined(), None, UNSEEN) for minor in minors(TESTED)),
        (UNTESTED, Examined(), None, UNSEEN),
        ((*UNTESTED[:2], "0rc1"), Examined(), None, (logging.INFO, "but all that kvshm relies on")),
        ((*EXACT[-1], "rc1"), Examined(), None, UNSEEN),
        ((*EXACT[-1], "dev12", "gabcdef"), Examined(), None, UNSEEN),
        ((0, 0, "dev"), Examined(), None, (logging.INFO, "vLLM 0.0.dev is not among")),
        # changed
        *(
            (version, Examined((DIFFERENT,)), f"vLLM {dotted(version)} is not as the tested", None)
            for version in ((*minors(TESTED)[0], 9), UNTESTED, (0, 0, "dev"))
        ),
        (UNTESTED, Examined((GONE,)), "vllm/v1/core/block_pool.py, which is missing (fact", None),
        (EXACT[-1], Examined((DIFFERENT,)), f"is not as the tested {TESTED[-1]} in what", None),
        (
            EXACT[-1],
            Examined((DIFFERENT,)),
            "another); install vLLM again, or KVSHM_UNTESTED",
            None,
        ),
        # not all there
        (EXACT[-1], Examined((GONE,)), "is incomplete, without vllm/v1/core", None),
        (
            (*minors(TESTED)[-1], 7),
            Examined((GONE,)),
            "block_pool.py, which is missing (fact",
            None,
        ),
        # without source
        (
            (*minors(TESTED)[0], 0),
            Examined((), ("a.py",)),
            None,
            (logging.INFO, "no source of a.py to compare with the tested one: kvshm goes by its"),
        ),
        (UNTESTED, Examined((), ("a.py",)), "no source of a.py to compare; upgrade kvshm", None),
        (
            (*minors(TESTED)[0], 0),
            Examined((DIFFERENT,), ("a.py",)),
            "BlockPool.touch in vllm/v1/core/block_pool.py (fact a-fact, another)",
            None,
        ),
        (TOO_OLD, Examined(), f"vLLM {dotted(TOO_OLD)} is too old, kvshm needs {TESTED[0]}", None),
    ]:
        with subtests.test(version=version, found=found, refusal=refusal, notice=notice):
            made = decide(version, found, TESTED, False)
            assert (made.refusal is None) == (refusal is None)
            assert str(refusal) in str(made.refusal)
            assert (made.notice is None) == (notice is None)
            if notice is not None and made.notice is not None:
                assert made.notice.line.level == notice[0]
                assert notice[1] in str(made.notice)


def test_one_that_is_as_another_version_is_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an upgrade leaves it that was interrupted."""
    own = vllm.__version_tuple__[:3]
    assert own in EXACT
    for version in EXACT:
        monkeypatch.setattr(vllm, "__version_tuple__", (*version, "cpu"))
        refusal = admit(False).refusal
        assert refusal is None if version == own else "install vLLM again" in str(refusal)


def test_who_may_share_all_the_same() -> None:
    """Not on a vLLM that is too old for kvshm's code, or that is not all there."""
    for version, found in ((UNTESTED, Examined((DIFFERENT,))), (UNTESTED, Examined((), ("a.py",)))):
        refused, allowed = (decide(version, found, TESTED, way) for way in (False, True))
        assert "KVSHM_UNTESTED=1 shares all the same, and answers may be wrong" in str(
            refused.refusal
        )
        assert allowed.refusal is None
        assert allowed.notice is not None
        assert allowed.notice.line.level == logging.WARNING
        assert "answers may be wrong" in str(allowed.notice)
    for version, found in ((TOO_OLD, Examined()), (EXACT[-1], Examined((GONE,)))):
        assert decide(version, found, TESTED, True) == decide(version, found, TESTED, False)
        assert "KVSHM_UNTESTED" not in str(decide(version, found, TESTED, True).refusal)


def test_a_line_names_some_of_many_differences() -> None:
    many = tuple(DIFFERENT._replace(name=f"function_{n}") for n in range(9))
    refusal = str(decide(UNTESTED, Examined(many), TESTED, False).refusal)
    assert [f"function_{n}" in refusal for n in range(9)] == [True] * 3 + [False] * 6
    assert "; and 6 more; upgrade kvshm" in refusal


@pytest.mark.parametrize("file", [None, "not json", "{}", '{"versions": ["1.0.0"], "files": {}}'])
def test_a_kvshm_that_is_incomplete_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines, file: str | None
) -> None:
    broken = tmp_path / "known.json"
    if file is not None:
        broken.write_text(file)
    monkeypatch.setattr("kvshm.hooks.vllm.admission.KNOWN", broken)
    monkeypatch.setattr(vllm, "__file__", str(tmp_path / "__init__.py"))
    known_sources.cache_clear()
    try:
        assert f"{broken} is damaged" in str(admit(False).refusal)
        assert "vLLM's source cannot be compared" in lines[-1]
    finally:
        known_sources.cache_clear()
