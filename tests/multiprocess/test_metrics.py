"""``kvshm metrics`` over toy engines, scraped by a real Prometheus: every query of deploy/grafana
runs and finds something, and what it finds is what the engines counted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from ..grafana import FOLDER, of_alerts, of_panels
from . import toys
from .processes import Node, fresh_node, wait_until

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not shutil.which("prometheus") and not os.environ.get("CI"),
        reason="prometheus is not installed",
    ),
]

QUIET = ("--requests", "0", "--loads", "0", "--peers", "0")
NOTHING_FAILS = {"Checks that fail"}
"""Panels that show faults only, and there are none."""
FIRES = {"KvshmPeerRefused"}
KEEPERS = "Keepers: "
"""How the titles of panels begin that show keepers only."""
MAY_FIRE = {"KvshmForcedBlocks", "KvshmDiscardedCopies", "KvshmReplicaLags"}
"""The same, by chance: caches of 24 blocks are overwritten all the time."""


SETTLED_SECONDS = 2.0
"""More than a scrape may take."""


class Monitored:
    def __init__(self, node: Node, folder: Path) -> None:
        self.node, self.coordinator, self.at = node, node.coordinator(), 0.0
        self.engines = [toys.start(node, seed) for seed in (1, 2)]
        self.stranger = toys.start(node, 3, *QUIET, "--weights", "others")
        self.exporter = node.processes.start("metrics", *self.kvshm("--listen", "0"))
        self.url = self.exporter.wait_err("serving").rpartition(" ")[2]
        self.api = self.start_prometheus(folder)
        self.results = [toys.result(engine) for engine in self.engines]
        wait_until(self.has_scraped, "Prometheus has what the engines counted")

    def kvshm(self, *arguments: str) -> list[str]:
        place = ("--run-dir", str(self.node.run_dir), "--namespace", self.node.namespace)
        return [sys.executable, "-m", "kvshm.tools.cli", "metrics", *arguments, *place]

    def start_prometheus(self, folder: Path) -> str:
        config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / "alerts.yaml")]
        target = self.url.removeprefix("http://").removesuffix("/metrics")
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        started = self.node.processes.start(
            "prometheus",
            "prometheus",
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            "--web.listen-address=127.0.0.1:0",
        )
        listens = started.wait_err(r'"Listening on"')
        return f"http://{re.findall(r'address=(.*)', listens)[0]}/api/v1"

    def choose_moment(self) -> None:
        """Ask from now on of a moment for which all scrapes have ended, well or not: what is known
        of it stays as it is, however slow the machine is after it."""
        self.at = time.time() - SETTLED_SECONDS

    def has_scraped(self) -> bool:
        self.choose_moment()
        lookups = [result["counters"]["lookups"] for result in self.results]
        try:
            found = self.ask("min_over_time(kvshm_lookups_total[2s]) > 0 and kvshm_lookups_total")
            refused = self.ask('count_over_time(kvshm_peer_state{state="refused"}[1m]) > 1')
        except urllib.error.HTTPError:  # it is still reading its data
            return False
        seen = sorted(int(each["value"][1]) for each in found)
        return seen == sorted(lookups) and len(refused) == 4

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """What Prometheus answers to a query of the moment; its errors fail the test."""
        query = urlencode({"query": expression, "time": f"{self.at:.3f}"})
        with urllib.request.urlopen(f"{self.api}/query?{query}", timeout=60) as answer:
            reported = json.load(answer)
        assert reported["status"] == "success"
        assert not reported.get("warnings")
        return list(reported["data"]["result"])

    def value(self, expression: str) -> float:
        (found,) = self.ask(expression)
        return float(found["value"][1])

    def scrape(self) -> str:
        with urllib.request.urlopen(self.url, timeout=60) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    with fresh_node() as node:
        yield Monitored(node, tmp_path_factory.mktemp("prometheus"))


def as_grafana_sends(expression: str) -> str:
    for variable, value in (
        ("$namespace", ".*"),
        ("$engine", ".*"),
        ("$__rate_interval", "1m"),
    ):
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


def test_each_query_of_the_dashboard_finds_something(monitored: Monitored) -> None:
    queries = of_panels()
    found = {query: bool(monitored.ask(as_grafana_sends(query.expression))) for query in queries}
    for query, finds in found.items():
        expected = query.where not in NOTHING_FAILS and not query.where.startswith(KEEPERS)
        assert finds == expected, query


def test_each_alert_is_evaluated_and_only_what_is_wrong_is_found(monitored: Monitored) -> None:
    found = {query.where for query in of_alerts() if monitored.ask(query.expression)}
    assert found | MAY_FIRE >= FIRES
    assert found <= FIRES | MAY_FIRE


def test_prometheus_has_what_the_engines_counted(monitored: Monitored) -> None:
    for engine, result in zip(monitored.engines, monitored.results, strict=True):
        name = f'{{engine="toy-{engine.pid}"}}'
        counted = result["counters"]
        assert monitored.value(f"kvshm_lookups_total{name}") == counted["lookups"]
        assert monitored.value(f"kvshm_imported_blocks_total{name}") == counted["imported_blocks"]
        copied = f"sum(kvshm_import_bytes_total{name})"
        assert monitored.value(copied) == counted["bytes_copied"]
        loads = counted.get("loads_done", 0) + counted.get("loads_failed", 0)
        assert monitored.value(f"sum(kvshm_loads_total{name})") == loads
        assert monitored.value(f"kvshm_match_length_tokens_count{name}") == counted["lookup_hits"]
        (row,) = monitored.ask(f"kvshm_import_bytes_total{name}")
        other = next(e for e in monitored.engines if e is not engine)
        assert (row["metric"]["peer"], row["metric"]["path"]) == (f"toy-{other.pid}", "shm")
    assert monitored.value("kvshm_coordinator_up") == 1


def test_promtool_finds_nothing_to_complain_of(monitored: Monitored) -> None:
    for check in (
        ("check", "rules", "--lint-fatal", str(FOLDER / "alerts.yaml")),
        ("test", "rules", str(FOLDER / "alerts_test.yaml")),
        ("check", "config", str(FOLDER / "prometheus.yaml")),
        ("check", "metrics"),
    ):
        done = subprocess.run(
            ["promtool", *check], input=monitored.scrape(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_log_says_nothing_of_good_scrapes(monitored: Monitored) -> None:
    assert len(monitored.exporter.err) == 1


def test_the_panels_of_keepers_show_one(monitored: Monitored) -> None:
    """But for what engines have copied from it: nobody has."""
    argv = [word for word in monitored.kvshm("--memory", "4M") if word != "metrics"]
    argv.insert(argv.index("kvshm.tools.cli") + 1, "keeper")
    keeper = monitored.node.processes.start("keeper", *argv)
    queries = [query for query in of_panels() if query.where.startswith(KEEPERS)]

    def shown() -> list[bool]:
        monitored.choose_moment()
        return [bool(monitored.ask(as_grafana_sends(query.expression))) for query in queries]

    wait_until(lambda: shown() == ["peer" not in query.expression for query in queries], "shown")
    assert keeper.terminate() == 0


# -- from here on the engines end


def test_a_stopped_coordinator_is_reported_and_the_exporter_ends_by_sigterm(
    monitored: Monitored,
) -> None:
    assert "\nkvshm_coordinator_up{" in monitored.scrape()
    monitored.coordinator.terminate()
    place = f'{{namespace="{monitored.node.namespace}"}}'
    wait_until(lambda: f"\nkvshm_coordinator_up{place} 0.0\n" in monitored.scrape(), "it is down")
    monitored.exporter.signal(signal.SIGTERM)
    assert monitored.exporter.wait() == 0
