"""``kvshm config``: each setting, its value and where the value comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from kvshm._base.extra_config import own_settings
from kvshm._base.setting_sources import ORDER
from kvshm.config import Config, list_settings
from kvshm.errors import ConfigError
from kvshm.interfaces import check_installed

from .output import aligned, clean, note, show

HELP = "print each setting, its value and where it came from"

UNSET = "unset"
_TRANSFER = "--kv-transfer-config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Print each setting, its value in a process that is started in this environment, and\n"
        "where the value comes from: the first of these sources that gives one counts.\n\n"
        + "\n".join(f"  {place}. {source}" for place, source in enumerate(ORDER, 1))
    )
    parser.epilog = "exit status: 0; 2 wrong command line or setting\n"
    parser.add_argument(
        _TRANSFER,
        metavar="JSON",
        help="as of an engine that is started with this option of vLLM",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(asked: argparse.Namespace) -> int:
    transfer = {} if asked.kv_transfer_config is None else _parse(asked.kv_transfer_config)
    extra = own_settings(
        transfer.get("kv_connector"), transfer.get("kv_connector_extra_config", {})
    )
    config = Config.from_env(os.environ, extra_config=extra)
    check_installed(config.transport, config.called("transport"))
    settings = list_settings(os.environ, extra)
    data = _as_json(settings, config.warnings)
    show(data, lambda: _lines(settings), as_json=asked.json)
    if not asked.json:
        note(*(f"kvshm: {warning}" for warning in config.warnings))
    return 0


def _lines(settings: list[tuple[str, str | None, str]]) -> Iterator[str]:
    rows = ((name, UNSET if value is None else value, origin) for name, value, origin in settings)
    return map(clean, aligned(rows))


def _as_json(
    settings: list[tuple[str, str | None, str]], warnings: tuple[str, ...]
) -> dict[str, Any]:
    """The values are texts, as variables have them; null: unset."""
    values = {name: {"value": value, "origin": origin} for name, value, origin in settings}
    return {"settings": values, "warnings": list(warnings)}


def _parse(text: str) -> Mapping[str, Any]:
    """Return what the option of vLLM says.  Raises ConfigError if it is no JSON object."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{_TRANSFER}={text!r} is not JSON: {exc}; correct it") from exc
    if not isinstance(options, dict):
        raise ConfigError(f"{_TRANSFER}={text!r} is not a JSON object; correct it")
    return options
