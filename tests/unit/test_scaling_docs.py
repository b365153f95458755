"""docs/scaling.md is the generated one, and its arithmetic is right."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import scaling_page
from scaling_page import (
    LIMITS,
    Cost,
    Measured,
    Node,
    Number,
    capacity,
    numbers,
    projected,
    reached,
    size,
)

from kvshm._replica.index import Replica
from kvshm._shm.layout import index_bytes, table_bytes

from .replicas import OWN_EPOCH, packed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scaling.md").read_text()
MEASURED = Measured(
    records=Number(40, "a replay"),
    wire=Number(50, "a replay"),
    apply=Cost(0.01, 3e-7, "a client"),
    coordinator=Cost(0.1, 2e-6, "a coordinator"),
    join=Number(4e-7, "joins"),
)
TRACE: dict[str, Any] = {
    "mode": "kvshm", "routing": "rr", "split": 1, "engines": 4, "requests": 10,
    "events": {"records": 600, "sent_bytes": 30_000},
}  # fmt: skip
RATES = [{"records_per_second": rate, "cores": 0.2 + 3e-6 * rate} for rate in (1e4, 1e5, 2e5)]
RESULTS: dict[str, list[dict[str, Any]]] = {
    "traces-whole": [
        TRACE,
        {**TRACE, "requests": 9, "engines": 8, "events": {"records": 1, "sent_bytes": 1}},
        {**TRACE, "engines": 2, "events": {"records": 1, "sent_bytes": 1}},
        {**TRACE, "requests": 90, "mode": "alone"},
        {"failed_run": "it ended"},
    ],
    "client": [{"lost_percent": {"p50": 1.5}, "records_heard_per_second": {"p50": 10_000}}],
    "client-crowd": [
        {"lost_percent": {"p50": 21.0}, "records_heard_per_second": {"p50": 400_000}},
        {"failed_run": "it ended"},
    ],
    "events": [
        {"row": "coordinator", "engines": 16, "rates": RATES},
        {"row": "coordinator", "engines": 2, "rates": [{**rate, "cores": 9} for rate in RATES]},
        {"row": "visible"},
    ],
    "join": [
        {"entries": 1000, "it begins to join, its replica is whole": {"p50": 0.5}},
        {"entries": 1000, "serving, all replicas are whole": {"p50": 9.0}},
    ],
}


def test_the_page_is_the_generated_one() -> None:
    assert runpy.run_path(str(ROOT / "docs/generate.py"))["scaling"](PAGE) == PAGE, "make docs"


def test_the_capacity_is_that_of_a_real_index() -> None:
    replica = Replica.create("scaling", "e", OWN_EPOCH, 8)
    row = replica.add_row(OWN_EPOCH, "a", 4096, 0)
    try:
        for block in range(1000):
            replica.apply(row, packed([block]))
            entries = block + 1
            assert replica.capacity == capacity(entries, scaling_page.fullest()), entries
    finally:
        replica.close()


def test_a_source_that_says_something_else_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "replica.c"
    source.write_text(scaling_page.REPLICA_SOURCE.read_text().replace("KVSHM_FULL", "KVSHM_OTHER"))
    monkeypatch.setattr(scaling_page, "REPLICA_SOURCE", source)
    with pytest.raises(ValueError, match="how full"):
        scaling_page.fullest()


def test_what_a_node_takes() -> None:
    node = Node(4, 1000)
    took = projected(node, MEASURED)
    room = capacity(3000, scaling_page.fullest())
    assert took["table"] == table_bytes(1000, 1)
    assert took["index"] == index_bytes(room)
    assert took["memory"] == 4 * (took["table"] + took["index"] + 3000 * 16)
    assert took["records"] == pytest.approx(1e6 / 3600 * MEASURED.records.value * 32)
    assert took["received"] == 4 * took["sent"]
    twice = projected(Node(8, 1000), MEASURED)
    assert twice["coordinator"] == pytest.approx(2 * took["coordinator"])
    assert twice["records"] == took["records"]
    assert took["coordinator"] == pytest.approx((0.1 + 2e-6 * took["records"]) * 4 / 16)
    assert twice["apply"] == pytest.approx(0.01 + 3e-7 * twice["records"] * 7 / 8)


def test_the_limit_that_is_used_most_comes_first() -> None:
    took = dict.fromkeys(projected(Node(2, 8), MEASURED), 0.0)
    by_name = [limit.name for limit, _ in reached(Node(28, 8), took)]
    assert by_name[0] == "lease bits"
    limit, share = reached(Node(2, 8), {**took, "coordinator": 3.0})[0]
    assert (limit.name, share) == ("the coordinator's core", 3.0)
    assert len(by_name) == len(LIMITS)


def test_numbers_are_those_of_the_last_results_of_their_kind() -> None:
    found = numbers(RESULTS)
    assert (found.records.value, found.wire.value) == (60, 50)
    assert found.apply[:2] == pytest.approx((0.01, 0.5e-6))
    assert found.coordinator[:2] == pytest.approx((0.2, 3e-6))
    assert found.join.value == pytest.approx(0.5e-6)
    assert all("benchmarks/results" in number.source for number in found)
    assert "| records of a request | 60.0, in" in scaling_page.page(RESULTS)


@pytest.mark.parametrize("name", RESULTS)
def test_missing_results_are_named(name: str) -> None:
    left = {other: lines for other, lines in RESULTS.items() if other != name}
    with pytest.raises(LookupError, match="traces" if "traces" in name else name):
        numbers(left)


def test_sizes_have_three_digits() -> None:
    shown = [size(0), size(999), size(1000), size(9.5e9), size(1.27e12), size(28, "")]
    assert shown == ["0 B", "999 B", "1 kB", "9.5 GB", "1.27 TB", "28"]
