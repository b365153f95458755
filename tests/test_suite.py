"""What the tests' own page says of the suite, and what runs where."""

from __future__ import annotations

import pytest

from .side_by_side import together

VERSIONS, DOCS = "tests/multiprocess/test_versions.py", "tests/multiprocess/test_docs_run.py"
CLIENT, CORE = "tests/multiprocess/test_client.py", "tests/core/test_sanitizers.py"
QUANTIZED = "tests/vllm/test_quantized.py"
CONFORMANCE = "tests/conformance/test_transport.py"


def test_what_shares_something_dear_stays_in_one_worker(subtests: pytest.Subtests) -> None:
    for one, other, stay_together in [
        ("tests/packaging/test_alone.py::test_a", "tests/packaging/test_contents.py::test_b", True),
        (f"{VERSIONS}::test_a", f"{VERSIONS}::test_b[x]", True),
        (f"{VERSIONS}::test_a", f"{DOCS}::test_a", False),
        (f"{CLIENT}::test_a", f"{CLIENT}::test_b", False),
        (f"{QUANTIZED}::test_equal_a[x]", f"{QUANTIZED}::test_what_b", True),
        (f"{QUANTIZED}::test_equal_a[x]", f"{QUANTIZED}::test_of_several_ranks", False),
        (f"{CORE}::test_a[thread-x]", f"{CORE}::test_a[thread-y]", True),
        (f"{CORE}::test_a[address,undefined-x]", f"{CORE}::test_a[thread-x]", False),
        (f"{CONFORMANCE}::test_a[loopback]", f"{CONFORMANCE}::test_b[loopback-x]", True),
        (f"{CONFORMANCE}::test_a[loopback]", f"{CONFORMANCE}::test_a[posix_shm]", False),
    ]:
        with subtests.test(one=one, other=other, stay_together=stay_together):
            assert (together(one) == together(other)) == stay_together
