"""What an engine does, exporting and importing: every cell of the table in
docs/configuration.md, by the rule, and on real schedulers.

The expectation is read from the page: a source takes away what its row denies, and the others'
rows give nothing back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.kv_transfer import KVRole
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvshm._base.roles import Decision, Limit
from kvshm.config import Config
from kvshm.hooks.vllm import plugin
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.exports import pool_watch
from kvshm.hooks.vllm.registration import CONNECTOR, CONNECTOR_MODULE
from kvshm.hooks.vllm.roles import CLIENTS_IDS, kv_role_limit, scheduler_limits
from kvshm.hooks.vllm.vllm_scheduler import VllmScheduler

from .conftest import Lines
from .scheduling import (
    BLOCK_SIZE,
    DrivenEngine,
    Make,
    imagined_cache,
    prompt,
    roles_of_epoch,
    vllm_config,
)

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text("utf-8")


class Row(NamedTuple):
    """What the page says of one value of one source."""

    source: str
    value: str
    exports: bool
    imports: bool


def rows() -> Iterator[Row]:
    _, _, rest = PAGE.partition("<!-- roles -->\n")
    table, _, _ = rest.partition("<!-- end of roles -->")
    for line in table.splitlines()[2:]:
        source, value, exports, imports = line.strip("| ").split(" | ")
        yield Row(source.replace("`", ""), value, exports == "yes", imports == "yes")


ROWS = tuple(rows())
SOURCES = tuple(dict.fromkeys(row.source for row in ROWS))
SHARE, ROLE, KV_ROLE, ENGINES_KV_ROLE, IDS, SCHEDULER, POOL = SOURCES
CELLS = list(product(*([row for row in ROWS if row.source == source] for source in SOURCES)))


def name(cell: tuple[Row, ...]) -> str:
    return ", ".join(row.value for row in cell)


def transfer(role: str) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="KvshmConnector", kv_role=role)


def scheduler(state: str) -> VllmScheduler | None:
    """vLLM's scheduler, as far as it is looked at."""
    if state == "not found":
        return None
    writes = state == "frees blocks while they are written"
    config = SimpleNamespace(max_concurrent_batches=2 if writes else 1)
    seen = {"vllm_config": config, "defer_block_free": False, "connector": None}
    return VllmScheduler(SimpleNamespace(**seen, reset_prefix_cache=None), None)


def pool_limits(state: str) -> list[Limit]:
    denied = {
        "does not tell of blocks that change": Limit(state, True, False),
        "does not tell of resets": Limit(state, True, True),
    }
    return [denied[state]] if state in denied else []


def decided(cell: tuple[Row, ...]) -> tuple[Decision, dict[str, str]]:
    """What the product decides, and what it calls the sources that may have decided it."""
    value = {row.source: row.value for row in cell}
    config = Config.from_env({"KVSHM_SHARE": value[SHARE], "KVSHM_ROLE": value[ROLE]})
    own = kv_role_limit(transfer(value[KV_ROLE]))
    engines = transfer(value[ENGINES_KV_ROLE])
    ids = {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": str(int(value[IDS] == CLIENTS_IDS))}
    with patch.dict(os.environ, ids):
        found = list(scheduler_limits(scheduler(value[SCHEDULER]), engines))
    limits = [own, *found, *pool_limits(value[POOL])]
    called = {
        SHARE: f"KVSHM_SHARE={value[SHARE]}",
        ROLE: f"KVSHM_ROLE={value[ROLE]}",
        KV_ROLE: f"kv_role={value[KV_ROLE]}",
        ENGINES_KV_ROLE: f"kv_role={value[ENGINES_KV_ROLE]} of the engine",
        IDS: value[IDS],
        SCHEDULER: "vLLM's scheduler was not found"
        if value[SCHEDULER] == "not found"
        else "this vLLM frees blocks while they are written",
        POOL: value[POOL],
    }
    return config.decide_role(*limits), called


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_a_source_takes_away_and_none_gives_back(cell: tuple[Row, ...]) -> None:
    decision, called = decided(cell)
    against_exports = [row for row in cell if not row.exports]
    against_imports = [row for row in cell if not row.imports]
    assert decision.no_exports == (called[against_exports[0].source] if against_exports else "")
    assert decision.no_imports == (called[against_imports[0].source] if against_imports else "")
    nothing_left = bool(against_exports and against_imports)
    assert (decision.refusal is not None) == nothing_left


def test_the_page_has_every_source_and_every_value() -> None:
    assert len(CELLS) == 3**6 * 2
    assert {row.value for row in ROWS if row.source == SHARE} == {"all", "salted-only", "none"}
    assert {row.value for row in ROWS if row.source == ROLE} == {"both", "producer", "consumer"}
    for source in (KV_ROLE, ENGINES_KV_ROLE):
        assert {row.value for row in ROWS if row.source == source} == set(get_args(KVRole))


# -- on real schedulers: what others may read, and what is asked of the ranks

Settings = dict[str, str]
REAL = [
    (share, role, kv_role, pool)
    for share, role, kv_role, pool in product(
        *([row for row in ROWS if row.source == one] for one in (SHARE, ROLE, KV_ROLE, POOL))
    )
    if share.value != "salted-only"
    # One more source that denies all is enough of those that end like this one.
    and (share.value != "none" or (role.value, pool.value) == ("both", "as kvshm knows it"))
]


def started(config: VllmConfig) -> DrivenEngine:
    """The engine, joined unless it does not share."""
    made = DrivenEngine(config, shares=False)
    if made.connector._scheduler is not None:
        made.wait_for_epoch()
    return made


def exports_and_imports(engine: DrivenEngine) -> tuple[bool, bool]:
    side = engine.connector._scheduler
    if side is None:
        engine.add("alone", prompt(3))
        assert engine.schedule().output.num_scheduled_tokens == {"alone": len(prompt(3))}
        return False, False
    engine.add("computed", prompt(3), max_tokens=1)
    engine.step()
    exports = bool(engine.ready())
    side.importer.match = lambda *_: 2 * BLOCK_SIZE  # as if another engine had them
    engine.add("imported", prompt(3, first=700), max_tokens=1)
    return exports, bool(engine.schedule().metadata.loads)


@pytest.mark.parametrize("cell", REAL, ids=name)
def test_an_engine_does_what_the_page_says_and_says_so_once(
    model: Path, engine: Make, lines: Lines, monkeypatch: pytest.MonkeyPatch, cell: Any
) -> None:
    share, role, kv_role, pool = cell
    monkeypatch.setenv("KVSHM_SHARE", share.value)
    monkeypatch.setenv("KVSHM_ROLE", role.value)
    if pool.value == "does not tell of resets":
        monkeypatch.setattr(pool_watch, "FOR_SHARING", ("of_old",))
    elif pool.value == "does not tell of blocks that change":
        monkeypatch.setattr(pool_watch, "FOR_EXPORT", ("of_old",))
    config = vllm_config(model)
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_role = kv_role.value
    one = started(config)
    exports, imports = all(row.exports for row in cell), all(row.imports for row in cell)
    nothing = not exports and not imports
    assert roles_of_epoch(one) == (exports, imports)
    assert exports_and_imports(one) == (exports, imports)
    one.close()
    kinds = tuple(
        f"kvshm: {kind}"
        for kind in (
            "exporting and importing",
            "exporting only: ",
            "importing only: ",
            "not sharing",
        )
    )
    (line,) = [line for line in lines if line.startswith(kinds)]
    said = kinds[3 if nothing else 1 if not imports else 2 if not exports else 0]
    assert line.startswith(said)
    promises = [line for line in lines if "shares its prefix cache" in line]
    assert all("if its role and its KV cache allow it" in promise for promise in promises)
    first_against = next((row for row in cell if not (row.exports and row.imports)), None)
    if first_against is pool:
        assert line.endswith("the block pool of this vLLM has no of_old")
    elif first_against is not None:
        assert f"={first_against.value}" in line


UNNAMED = [cell for cell in REAL if (cell[0].value, cell[3].value) == ("all", "as kvshm knows it")]


@pytest.mark.parametrize("cell", UNNAMED, ids=name)
def test_a_kv_role_without_a_connector_is_that_of_the_connector_which_kvshm_installs(
    model: Path, engine: Make, monkeypatch: pytest.MonkeyPatch, cell: Any
) -> None:
    _, role, kv_role, _ = cell
    monkeypatch.setattr(VllmConfig, plugin.TOUCHPOINT, getattr(VllmConfig, plugin.TOUCHPOINT))
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.setenv("KVSHM_ROLE", role.value)
    plugin.activate()
    extra = {"max_import_blocks": 3}
    given = KVTransferConfig(
        kv_role=kv_role.value, engine_id="mine", kv_port=7, kv_connector_extra_config=extra
    )
    config = vllm_config(model, given)
    made = config.kv_transfer_config
    assert made is not None
    assert (made.kv_connector, made.kv_connector_module_path) == (CONNECTOR, CONNECTOR_MODULE)
    assert (made.kv_role, made.kv_load_failure_policy) == (kv_role.value, "recompute")
    assert (made.engine_id, made.kv_port, made.kv_connector_extra_config) == ("mine", 7, extra)
    assert given.kv_connector is None
    one = started(config)
    exports, imports = all(row.exports for row in cell), all(row.imports for row in cell)
    assert exports_and_imports(one) == (exports, imports)
    one.close()


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_settings_that_leave_nothing_are_seen_by_both_sides_before_anything_is_set_up(
    model: Path, engine: Make, monkeypatch: pytest.MonkeyPatch, role: KVConnectorRole
) -> None:
    """Neither half joins, and the KV cache stays in vLLM's own memory."""
    monkeypatch.setenv("KVSHM_ROLE", "consumer")
    config = vllm_config(model)
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_role = "kv_producer"
    connector = KvshmConnector(config, role, imagined_cache(8))
    assert connector._scheduler is connector._worker is connector.get_mem_pool_context() is None


def test_priority_scheduling_is_no_source(model: Path, engine: Make) -> None:
    assert exports_and_imports(started(vllm_config(model, scheduling_policy="priority"))) == (
        True,
        True,
    )
