"""Every setting of kvshm: its name, what it accepts, its default and its unit.

Settings are environment variables.  ``Config.from_env`` is the one place that reads and
checks them, when kvshm is activated or the coordinator starts; a bad value stops the start.
A variable that is set but empty counts as unset.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

from .errors import ConfigError
from .rundir import SOCKET_PATH_BYTES, choose_run_directory

PREFIX = "KVSHM_"
SOCKET_NAME_BYTES = 32
"""What is kept free in a socket's path for its name, beside the namespace."""

_READ_ELSEWHERE = frozenset({"KVSHM_TEST_SYNC_POINT", "KVSHM_TEST_TIME_SCALE"})
# What Kubernetes injects into every pod beside a Service named "kvshm" or "kvshm-...".
_KUBERNETES = re.compile(r"KVSHM_(\w+_)?(PORT|PORT_\w+|SERVICE_\w+)")


class Role(StrEnum):
    """What an engine does with others' and its own blocks."""

    BOTH = "both"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class Share(StrEnum):
    """Whose blocks are shared: every request's, those with a cache_salt, nobody's."""

    ALL = "all"
    SALTED_ONLY = "salted-only"
    NONE = "none"


class Fault(StrEnum):
    """Faults built in on purpose, to see the verification notice them."""

    WRONG_BLOCK = "wrong-block"
    ZERO = "zero"
    SHIFT = "shift"


class Auto(StrEnum):
    """A value that the engine finds out by itself."""

    AUTO = "auto"


class Setting(NamedTuple):
    """One environment variable; ``parse`` raises ValueError for what it does not accept."""

    name: str
    field: str
    default: Any
    parse: Callable[[str], Any]
    accepts: str
    sentence: str
    for_tests: bool


def _switch(text: str) -> bool:
    return ("0", "1").index(text) == 1


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # int() would also read blanks, signs, underscores and the digits of other scripts.
        if not re.fullmatch("[0-9]+", text) or (number := int(text)) < least:
            raise ValueError
        return number

    return parse


def _tokens(text: str) -> int | Auto:
    return Auto.AUTO if text == Auto.AUTO else _whole(0)(text)


def _milliseconds(text: str) -> float:
    # float() would also read blanks, underscores, the digits of other scripts, nan and inf.
    if not re.fullmatch("[0-9.eE+-]+", text) or not 0 <= (number := float(text)) <= 1000:
        raise ValueError
    return number


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9_-]{1,32}", text):
        raise ValueError
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/") or not text.isprintable():
        raise ValueError
    return os.path.normpath(text)


def _level(text: str) -> str:
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    return levels[levels.index(text.upper())]


def _about(
    parse: Callable[[str], Any], accepts: str, sentence: str, *, for_tests: bool = False
) -> dict[str, Any]:
    """Return a setting's field metadata; SETTINGS is read off the fields of Config."""
    return {"parse": parse, "accepts": accepts, "sentence": sentence, "for_tests": for_tests}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one process, checked.  Any process; immutable."""

    enable: bool = field(
        default=False, metadata=_about(_switch, "0 or 1", "Share this engine's prefix cache.")
    )
    run_dir: str = field(
        default="",
        metadata=_about(
            _absolute,
            "an absolute path",
            "Directory of the sockets; unless set $XDG_RUNTIME_DIR/kvshm, else /tmp/kvshm-<uid>, "
            "or one in $HOME if that name is taken by another user.",
        ),
    )
    namespace: str = field(
        default="default",
        metadata=_about(
            _namespace,
            "1 to 32 of a-z, 0-9, _ and -",
            "Engines and coordinator meet only within one namespace.",
        ),
    )
    role: Role = field(
        default=Role.BOTH,
        metadata=_about(
            Role,
            "both, producer or consumer",
            "Whether the engine exports its blocks, imports others', or does both.",
        ),
    )
    min_prefix_tokens: int | Auto = field(
        default=Auto.AUTO,
        metadata=_about(
            _tokens,
            "auto, or a whole number of tokens, 0 or more",
            "Fewer tokens than this are computed rather than imported; 0 means one block. With "
            "auto, what is estimated to be computed sooner, 256 before there are estimates; who "
            "finds everything elsewhere computes one import in 64 to see, in eight at first.",
        ),
    )
    drain_budget_ms: float = field(
        default=1.0,
        metadata=_about(
            _milliseconds,
            "a number of milliseconds from 0 to 1000",
            "Longest wait per step for importers of blocks about to be reused; "
            "unless set, 0 without asynchronous scheduling.",
        ),
    )
    max_import_blocks: int = field(
        default=16384,
        metadata=_about(
            _whole(1),
            "a whole number of blocks, 1 or more",
            "Most blocks imported for one request.",
        ),
    )
    share: Share = field(
        default=Share.ALL,
        metadata=_about(
            Share,
            "all, salted-only or none",
            "Whose blocks are shared: every request's, only those with a cache_salt, nobody's.",
        ),
    )
    verify: bool = field(
        default=False,
        metadata=_about(
            _switch, "0 or 1", "Checksum blocks when published and compare after each import."
        ),
    )
    staging: bool = field(
        default=False,
        metadata=_about(
            _switch,
            "0 or 1",
            "Copy through host memory between GPUs that cannot reach each other, "
            "instead of leaving them unshared.",
        ),
    )
    log_level: str = field(
        default="INFO",
        metadata=_about(
            _level, "debug, info, warning or error", "Least severe level that is logged."
        ),
    )
    beside: bool = field(
        default=False,
        metadata=_about(
            _switch,
            "0 or 1",
            "Share also on an engine that has a connector of its own, in a MultiConnector with it.",
        ),
    )
    allow_untested_vllm: bool = field(
        default=False,
        metadata=_about(
            _switch, "0 or 1", "Share on versions of vLLM that kvshm has not been tested with."
        ),
    )
    fault: Fault | None = field(
        default=None,
        metadata=_about(
            Fault,
            "wrong-block, zero or shift",
            "Spoil each import in this way, to see it noticed.",
            for_tests=True,
        ),
    )
    strict: bool = field(
        default=False,
        metadata=_about(
            _switch,
            "0 or 1",
            "Raise errors at the border to vLLM instead of treating them as a cache miss.",
            for_tests=True,
        ),
    )
    given: frozenset[str] = frozenset()
    """Names of the settings that the environment gave."""
    warnings: tuple[str, ...] = ()
    """What looks like a mistake but stops nothing; to be logged once."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Config:
        """Return the checked settings.  Touches nothing but its argument.  Raises ConfigError
        naming setting, value and remedy."""
        values = {s.field: _value(s, environ[s.name]) for s in SETTINGS if environ.get(s.name)}
        given = frozenset(s.name for s in SETTINGS if s.field in values)
        warnings = (*_strangers(environ), *_left_out(environ))
        config = cls(**values, given=given, warnings=warnings)
        _check_length(config)
        return config

    @property
    def exports(self) -> bool:
        """Whether this engine's blocks may be published."""
        return self.role is not Role.CONSUMER and self.share is not Share.NONE

    @property
    def imports(self) -> bool:
        """Whether this engine may import others' blocks."""
        return self.role is not Role.PRODUCER and self.share is not Share.NONE

    def step_budget_ms(self, asynchronous: bool) -> float:
        """Drain budget of one step.  Without asynchronous scheduling nothing overlaps the
        wait, so it is 0 unless the setting was given."""
        wanted = asynchronous or "KVSHM_DRAIN_BUDGET_MS" in self.given
        return self.drain_budget_ms if wanted else 0.0


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(PREFIX + f.name.upper(), f.name, default=f.default, **f.metadata)
    for f in fields(Config)
    if f.metadata
)


class Described(NamedTuple):
    """A setting as it stands."""

    name: str
    value: str
    """In force; "unset" where there is none."""
    origin: str
    """Where it came from."""


def describe(environ: Mapping[str, str]) -> list[Described]:
    """Return every setting as it stands.  Raises ConfigError like ``Config.from_env``."""
    config = Config.from_env(environ)
    return [_described(setting, config, environ) for setting in SETTINGS]


def _described(setting: Setting, config: Config, environ: Mapping[str, str]) -> Described:
    value = getattr(config, setting.field)
    if setting.name in config.given:
        return Described(setting.name, _shown(value), "environment")
    if setting.field == "run_dir":
        chosen = choose_run_directory("", environ)
        runtime = environ.get("XDG_RUNTIME_DIR", "").startswith("/")
        return Described(setting.name, str(chosen), "XDG_RUNTIME_DIR" if runtime else "default")
    return Described(setting.name, _shown(value), "default")


def _value(setting: Setting, text: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError:
        # The parser's own words would only repeat the value.
        raise ConfigError(
            f"{setting.name}={text!r} is not {setting.accepts}; correct it, or unset it for "
            f"the default ({_shown(setting.default)})"
        ) from None


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "unset" if value in (None, "") else str(value)


def _check_length(config: Config) -> None:
    """Refuse a run directory below which a socket's path would become too long."""
    room = SOCKET_PATH_BYTES - SOCKET_NAME_BYTES - len(config.namespace) - 2
    if (length := len(os.fsencode(config.run_dir))) > room:
        raise ConfigError(
            f"KVSHM_RUN_DIR={config.run_dir!r} has {length} bytes, at most {room} leave room "
            f"for a socket of namespace {config.namespace!r}; choose a shorter path"
        )


def _left_out(environ: Mapping[str, str]) -> Iterator[str]:
    """vLLM loads the plugins that VLLM_PLUGINS names, and without ours nobody reads
    KVSHM_ENABLE.  Then no process of vLLM can say so, but ``kvshm config`` can."""
    plugins = environ.get("VLLM_PLUGINS")
    if environ.get("KVSHM_ENABLE") != "1" or plugins is None or "kvshm" in plugins.split(","):
        return
    yield (
        f"VLLM_PLUGINS={plugins!r} leaves kvshm out, so vLLM does not look at KVSHM_ENABLE; "
        "add kvshm to it"
    )


def _strangers(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = {s.name for s in SETTINGS} | _READ_ELSEWHERE
    unknown = (n for n in environ if n.startswith(PREFIX) and not _KUBERNETES.fullmatch(n))
    return tuple(_unknown(name, known) for name in sorted(unknown) if name not in known)


def _unknown(name: str, known: set[str]) -> str:
    from difflib import get_close_matches  # only needed for a mistake

    nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return f"{name} is no setting of kvshm and does nothing; did you mean {nearest[0]}?"
