"""deploy/grafana/ against the exporter's registry, the run books and itself."""

from __future__ import annotations

import re
from pathlib import Path

from kvshm.tools.metrics.definitions import METRICS, Kind

from ..grafana import DASHBOARD, FOLDER, Query, alerts, of_alerts, of_panels, panels, read_yaml
from .test_docs_commands import anchors

ROOT = Path(__file__).parents[2]
OF_PROMETHEUS = {"instance", "job"}
PARTS = {"_bucket": {"le"}, "_sum": set(), "_count": set()}


def series() -> dict[str, set[str]]:
    """The names of all series that the exporter has, with their labels."""
    found = {}
    for name, metric in METRICS.items():
        if metric.kind is Kind.HISTOGRAM:
            found |= {name + part: {*metric.labels} | more for part, more in PARTS.items()}
        else:
            found[name] = {*metric.labels}
    return found


def variables() -> list[Query]:
    listed = DASHBOARD["templating"]["list"]
    return [Query(v["name"], v["definition"]) for v in listed if "definition" in v]


def unknown(query: Query) -> set[str]:
    """The names of metrics and labels in a query that do not exist."""
    known = series()
    named = set(re.findall(r"\bkvshm_\w+", query.expression))
    wrong = named - known.keys()
    if not named and not query.expression.startswith("up{"):
        wrong.add("no metric")
    for name, matchers in re.findall(r"\b(kvshm_\w+)\{([^}]*)\}", query.expression):
        wrong |= set(re.findall(r"(\w+)\s*[!=]~?=?\"", matchers)) - known.get(name, set())
    grouped = re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", query.expression)
    labels = {label for group in grouped for label in re.split(r",\s*", group)}
    return wrong | labels - OF_PROMETHEUS.union(*(known.get(name, ()) for name in named))


def test_each_query_names_metrics_and_labels_that_exist() -> None:
    for queries in (of_panels(), of_alerts(), variables()):
        assert queries
        assert {query.where: unknown(query) for query in queries if unknown(query)} == {}
    bad = Query("x", 'sum by (host) (kvshm_lookups_total{engin="a"} > kvshm_nothing)')
    assert unknown(bad) == {"engin", "host", "kvshm_nothing"}


def test_each_metric_is_shown_by_a_panel_or_not_for_a_reason() -> None:
    """A metric that no panel shows is one for people who ask for it by name."""
    shown = {name for query in of_panels() for name in re.findall(r"\bkvshm_\w+", query.expression)}
    shown |= {name.removesuffix(part) for name in shown for part in PARTS}
    assert METRICS.keys() - shown == {
        f"kvshm_{name}"
        for name in (
            "imported_tokens_total", "imported_blocks_total", "matched_blocks_total",
            "trial_imports_total", "imports_total", "import_blocks_total", "loads_started_total",
            "loads_at_once_total", "rejected_blocks_total", "verified_blocks_total",
            "leases_taken_total", "leases_lost_total", "estimated_seconds_total",
            "blocks_drained_total", "blocks_kept_total", "leases_swept_total",
            "events_sent_total", "events_unheard_total", "resyncs_total", "rejoins_total",
            "still_mapped_total",
            "replica_lacking_blocks", "epoch_start_timestamp_seconds",
            "coordinator_last_progress_timestamp_seconds",
        )
    }  # fmt: skip


def test_the_dashboard_has_its_rows_and_each_panel_a_place_of_its_own() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert (DASHBOARD["uid"], rows) == (
        "kvshm",
        ["Value", "Copies", "Health", "Memory", "A store beyond the node"],
    )
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == [
        "datasource", "namespace", "engine",
    ]  # fmt: skip
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert all(panel["description"].endswith(".") for panel in panels())
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}


def test_each_alert_says_what_is_wrong_and_leads_to_its_run_book() -> None:
    rules = alerts()
    assert rules
    for rule in rules:
        assert rule["labels"].keys() == {"severity"}, rule
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}, rule
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (page, anchor) == ("docs/operations.md", rule["alert"].lower())
        assert anchor in anchors(ROOT / page)


def test_each_alert_is_seen_firing_and_not_firing() -> None:
    """In what promtool tests (tests/multiprocess/test_metrics.py)."""
    fires, rests = set(), set()
    for test in read_yaml("alerts_test.yaml")["tests"]:
        fires |= {
            name
            for each in test.get("promql_expr_test", ())
            for name in re.findall(r'alertname="(\w+)"', each["expr"])
        }
        for each in test["alert_rule_test"]:
            (fires if each["exp_alerts"] else rests).add(each["alertname"])
    assert fires == rests == {rule["alert"] for rule in alerts()}


def test_the_compose_file_mounts_what_is_there_and_starts_tagged_images() -> None:
    compose = read_yaml("compose.yaml")
    for service in compose["services"].values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        mounted = {source: target for source, target, *_ in map(split, service["volumes"])}
        for source, target in mounted.items():
            if source.startswith("."):
                assert (FOLDER / source).exists(), source
            else:
                assert source in compose["volumes"], source
            assert target.startswith("/")
    prometheus, grafana = compose["services"].values()
    (config,) = (a for a in prometheus["command"] if a.startswith("--config.file="))
    assert f"./prometheus.yaml:{config.partition('=')[2]}:ro" in prometheus["volumes"]
    rules = read_yaml("prometheus.yaml")["rule_files"]
    beside = str(Path(config.partition("=")[2]).parent)
    assert {f"./{name}:{beside}/{name}:ro" for name in rules} <= set(prometheus["volumes"])
    (provider,) = read_yaml("provisioning/dashboards/kvshm.yaml")["providers"]
    assert f"./kvshm.json:{provider['options']['path']}/kvshm.json:ro" in grafana["volumes"]
    (source,) = read_yaml("provisioning/datasources/kvshm.yaml")["datasources"]
    assert source["url"].removeprefix("http://") in " ".join(prometheus["command"])
    (scraped,) = read_yaml("prometheus.yaml")["scrape_configs"]
    assert scraped["job_name"] == "kvshm"


def split(volume: str) -> list[str]:
    return volume.split(":")
