"""Where the values of settings come from: of several sources the one that ``ORDER`` names first
counts."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from kvshm.errors import ConfigError

from .core_lines import CoreLine
from .log_lines import FilledLine
from .roles import Limit
from .setting_values import absolute_path

PREFIX = "KVSHM_"
FILE_VARIABLE = "KVSHM_CONFIG"
"""Names the file; without it no file is read."""

ORDER = (
    "an option of the command that is started, as --run-dir of kvshm-coordinator",
    "kv_connector_extra_config of the engine (--kv-transfer-config)",
    "the environment variable",
    f"the TOML file that {FILE_VARIABLE} names",
    "the default",
)
"""The sources.  The first one that says something of a setting counts."""

_TOO_LATE = {"enable", "untested"}
"""Read before there is a configuration of an engine: they decide whether kvshm looks at one."""

# Variables that Kubernetes sets in every pod if there is a Service named "kvshm" or "kvshm-...".
_KUBERNETES = re.compile(r"KVSHM_(\w+_)?(PORT|PORT_\w+|SERVICE_\w+)")


class Given(NamedTuple):
    """What a source says of one setting."""

    value: object
    """As the source has it: text, or a type of TOML or JSON."""
    called: str
    """What a message about the value calls the setting, so that its reader finds it."""
    origin: str


class Loaded(NamedTuple):
    """What a loader knows of settings beside their values."""

    sources: Mapping[str, Given] = {}  # never changed
    limits: tuple[Limit, ...] = ()
    mistakes: tuple[FilledLine, ...] = ()


Source = Mapping[str, Given]
"""What a source says, by the settings' fields in Config."""


class SettingsFile(NamedTuple):
    """A TOML file that was read."""

    path: str
    keys: Mapping[str, object]


def merged(*sources: Source) -> Source:
    """Return what counts of ``sources``, which come in the order of ORDER."""
    given = {field: one for source in reversed(sources) for field, one in source.items()}
    return {field: one for field, one in given.items() if one.value != ""}


def only(fields: Collection[str], source: Source) -> Source:
    return {field: source[field] for field in fields if field in source}


def of_options(options: Mapping[str, str | None]) -> Source:
    """Return what a command's options say, unless they are None."""
    return {
        option.removeprefix("--").replace("-", "_"): Given(text, option, "option")
        for option, text in options.items()
        if text is not None
    }


def of_environment(environ: Mapping[str, str], fields: Collection[str]) -> Source:
    """Return what the environment says of ``fields``.  An empty variable says nothing."""
    variables = {field: PREFIX + field.upper() for field in fields}
    return {
        field: Given(environ[name], name, "environment")
        for field, name in variables.items()
        if environ.get(name)
    }


def of_extra_config(extra: Mapping[str, object], fields: Collection[str]) -> Source:
    """Return what kvshm's part of ``kv_connector_extra_config`` says.  Raises ConfigError for a key
    that is none of ``fields``, and for one that is read before vLLM has that configuration."""
    where = "kv_connector_extra_config"
    refuse_unknown(extra, where, fields)
    for field in sorted(_TOO_LATE & {*extra}):
        raise ConfigError(
            f"{where}: {field} is read before vLLM has this configuration; set "
            f"{PREFIX}{field.upper()}, or {field} in the file that {FILE_VARIABLE} names"
        )
    return _of_table(extra, where, "kv_connector_extra_config")


def of_file(file: SettingsFile) -> Source:
    return _of_table(file.keys, file.path, f"file {file.path}")


def _of_table(table: Mapping[str, object], where: str, origin: str) -> Source:
    return {
        key: Given(value, f"{where}: {key}", origin)
        for key, value in table.items()
        if value not in (None, "")
    }


def file_of(environ: Mapping[str, str]) -> str:
    """Return the path of the file that the environment names, or "".  Raises ConfigError."""
    if not (path := environ.get(FILE_VARIABLE, "")):
        return ""
    try:
        return absolute_path(path)
    except ValueError:
        raise ConfigError(
            f"{FILE_VARIABLE}={path!r} is not an absolute path; correct it, or unset it to do "
            "without a file"
        ) from None


def read_file(environ: Mapping[str, str]) -> SettingsFile:
    """Return the file that the environment names.  Blocks.  Raises ConfigError."""
    if not (path := file_of(environ)):
        return SettingsFile("", {})
    called = f"{FILE_VARIABLE}={path!r}"
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{called} is not a regular file; name a TOML file")
            return SettingsFile(path, tomllib.load(file))
    except OSError as exc:
        raise ConfigError(
            f"{called} cannot be read: {exc.strerror}; make it readable, correct the path, or "
            "unset the variable"
        ) from exc
    except (ValueError, RecursionError) as exc:  # no TOML, no UTF-8, endless numbers or brackets
        raise ConfigError(f"{called} is not TOML: {exc}; correct the file") from exc


def _without_waiting(path: str, flags: int) -> int:
    """Open a pipe, too, so that it can be refused: without this the open waits for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def refuse_unknown(keys: Iterable[str], where: str, fields: Collection[str]) -> None:
    """Raise ConfigError if one of ``keys`` is no setting.  ``where``: the place they stand in."""
    for key in keys:
        if key not in fields:
            # The name of the variable leads to that of the key.
            like = str(key).lower().replace("-", "_").removeprefix(PREFIX.lower())
            near = nearest(like, fields)
            remedy = f"did you mean {near}?" if near else "`kvshm config` lists all settings"
            raise ConfigError(f"{where}: {key} is not a setting of kvshm; {remedy}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of ``known`` that is most like ``name``, None if none is."""
    from difflib import get_close_matches  # only needed for a mistake

    return next(iter(get_close_matches(name, sorted(known), n=1)), None)


# -- variables that are probably not as their user meant them, which stop no start


def unknown_names(environ: Mapping[str, str], known: Collection[str]) -> Iterator[FilledLine]:
    """Yield a line for each variable whose name looks like a setting's but is none of ``known``."""
    tails = {name.removeprefix(PREFIX) for name in known}
    for name in sorted(environ):
        tail = name.removeprefix(PREFIX)
        if tail == name or tail in tails or _KUBERNETES.fullmatch(name):
            continue
        near = nearest(tail, tails)
        remedy = f"did you mean {PREFIX}{near}?" if near else "`kvshm config` lists them all"
        yield CoreLine.UNKNOWN_SETTING.fill(name, remedy)


def plugin_left_out(environ: Mapping[str, str]) -> Iterator[FilledLine]:
    """Yield a line if VLLM_PLUGINS does not name kvshm, so that no process of vLLM can warn."""
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and "kvshm" not in plugins.split(","):
        yield CoreLine.PLUGIN_LEFT_OUT.fill(plugins)
