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
    """One expression, and the panel or alert that it belongs to."""

    where: str
    expression: str


def read_yaml(name: str) -> dict[str, Any]:
    """A file of the folder."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    return found


def alerts() -> list[dict[str, Any]]:
    """The alert rules."""
    return [rule for group in read_yaml("alerts.yaml")["groups"] for rule in group["rules"]]


def panels() -> Iterator[dict[str, Any]]:
    """The dashboard's panels that show something."""
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def of_panels() -> list[Query]:
    """The queries of all panels."""
    return [Query(p["title"], target["expr"]) for p in panels() for target in p["targets"]]


def of_alerts() -> list[Query]:
    """The expressions of all alerts."""
    return [Query(rule["alert"], rule["expr"]) for rule in alerts()]
