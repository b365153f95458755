"""Which vLLM kvshm shares on; no engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kvshm.hooks.vllm.refusals import TESTED_VLLM, version_refusal, version_warning

from .odd_vllm import TOO_OLD, UNTESTED, dotted


@pytest.mark.parametrize(
    ("version", "usable", "if_allowed"),
    [
        (TOO_OLD, False, False),
        ((0, 9, 0), False, False),
        *(((*minor, patch), True, True) for minor in TESTED_VLLM for patch in (0, 7)),
        ((*UNTESTED[:2], "0rc1"), False, True),
        ((1, 0, 0), False, True),
        ((0, 0, "dev"), False, True),
    ],
)
def test_which_vllm_versions_are_used(
    version: tuple[int | str, ...], usable: bool, if_allowed: bool
) -> None:
    reason = version_refusal(version, allowed=False)
    assert (reason is None) == usable
    assert usable or all(f"{dotted(minor)}.*" in str(reason) for minor in TESTED_VLLM)
    assert usable or not if_allowed or "KVSHM_ALLOW_UNTESTED_VLLM=1" in str(reason)
    assert (version_refusal(version, allowed=True) is None) == if_allowed
    assert (version_warning(version) is None) == usable
