"""What deploy/grafana asks Prometheus for: the queries of the dashboard and of the alerts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "kvshm.json").read_text("utf-8"))


class Query(NamedTuple):
    where: str
    expression: str


def read_yaml(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for group in read_yaml("alerts.yaml")["groups"] for rule in group["rules"]]


def panels() -> Iterator[dict[str, Any]]:
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def of_panels() -> list[Query]:
    return [Query(p["title"], target["expr"]) for p in panels() for target in p["targets"]]


def of_alerts() -> list[Query]:
    return [Query(rule["alert"], rule["expr"]) for rule in alerts()]
