"""Every setting of kvshm: its name, what it accepts, its default and its unit.

Settings are environment variables.  Only ``Config.from_env`` reads and checks them, when kvshm is
activated or the coordinator starts; a bad value stops the start.  An empty variable counts as
unset.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

from ._ground import syncpoints, timing
from ._ground.roles import Decision, Limit, Role, decide_role
from ._ground.rundir import SOCKET_PATH_BYTES, choose_run_directory
from .errors import ConfigError

PREFIX = "KVSHM_"
SOCKET_NAME_BYTES = 32
"""Bytes of a socket's path that are kept free for its name, in addition to the namespace."""

_READ_ELSEWHERE = frozenset({syncpoints.VARIABLE, timing.VARIABLE})
"""Read at the import of kvshm/_ground/syncpoints.py and timing.py, before there are settings; only
checked here."""

_BOOLEANS = {"0": False, "no": False, "false": False, "off": False}
_BOOLEANS |= {"1": True, "yes": True, "true": True, "on": True}
# Variables that Kubernetes sets in every pod if there is a Service named "kvshm" or "kvshm-...".
_KUBERNETES = re.compile(r"KVSHM_(\w+_)?(PORT|PORT_\w+|SERVICE_\w+)")


class Share(StrEnum):
    """Whose blocks are shared: all requests', those of requests with a cache_salt, or none."""

    ALL = "all"
    SALTED_ONLY = "salted-only"
    NONE = "none"


class Fault(StrEnum):
    """Deliberate faults, by which tests show that the verification notices them."""

    WRONG_BLOCK = "wrong-block"
    ZERO = "zero"
    SHIFT = "shift"


class LogFormat(StrEnum):
    """How a line of the log is written: for people, or for programs."""

    TEXT = "text"
    JSON = "json"


class Auto(StrEnum):
    """A value that the engine determines itself."""

    AUTO = "auto"


class Setting(NamedTuple):
    """One environment variable; ``parse`` raises ValueError for unacceptable text."""

    name: str
    field: str
    default: Any
    parse: Callable[[str], Any]
    accepts: str
    meaning: str
    for_tests: bool


def _boolean(text: str) -> bool:
    return _BOOLEANS[text.lower()]


def _whole_number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # int() also accepts blanks, signs, underscores and digits of other scripts.
        if not re.fullmatch("[0-9]+", text) or (number := int(text)) < least:
            raise ValueError
        return number

    return parse


def _auto_or_tokens(text: str) -> int | Auto:
    return Auto.AUTO if text == Auto.AUTO else _whole_number(0)(text)


def _milliseconds(text: str) -> float:
    # float() also accepts blanks, underscores, digits of other scripts, nan and inf.
    if not re.fullmatch("[0-9.eE+-]+", text) or not 0 <= (number := float(text)) <= 1000:
        raise ValueError
    return number


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9_-]{1,32}", text):
        raise ValueError
    return text


def _absolute_path(text: str) -> str:
    if not text.startswith("/") or not text.isprintable():
        raise ValueError
    return os.path.normpath(text)


def _transport(text: str) -> str:
    # Whether it is installed is looked up by the engine that is to use it.
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text):
        raise ValueError
    return text


def _log_level(text: str) -> str:
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    return levels[levels.index(text.upper())]


def _setting(
    default: Any, parse: Callable[[str], Any], accepts: str, meaning: str, for_tests: bool = False
) -> Any:
    """A field of Config that an environment variable sets.  SETTINGS is made from these."""
    about = {"parse": parse, "accepts": accepts, "meaning": meaning, "for_tests": for_tests}
    return field(default=default, metadata=about)


def _flag(meaning: str, for_tests: bool = False) -> Any:
    """A switch that is off by default."""
    accepts = "0 or 1 (or no, false, off; yes, true, on)"
    return _setting(False, _boolean, accepts, meaning, for_tests)


def _one_of(default: StrEnum, meaning: str) -> Any:
    *most, last = type(default)
    return _setting(default, type(default), f"{', '.join(most)} or {last}", meaning)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one process; docs/configuration.md lists them.  Any process; immutable.

    ``from_env`` reads and checks them.  The constructor takes each as a field: its name in small
    letters without ``KVSHM_``, as in ``Config(run_dir="/run/kvshm", role="producer")``.  It checks
    each value as that of the environment, and raises ConfigError.
    """

    enable: bool = _flag("Share this engine's prefix cache.")
    run_dir: str = _setting(
        "",
        _absolute_path,
        "an absolute path",
        "Directory of the sockets; unless set $XDG_RUNTIME_DIR/kvshm, else /tmp/kvshm-<uid>, "
        "or one in $HOME if that name is taken by another user.",
    )
    namespace: str = _setting(
        "default",
        _namespace,
        "1 to 32 of a-z, 0-9, _ and -",
        "Engines and coordinator find each other only within one namespace.",
    )
    role: Role = _one_of(
        Role.BOTH, "Whether the engine exports its blocks, imports others', or does both."
    )
    min_prefix_tokens: int | Auto = _setting(
        Auto.AUTO,
        _auto_or_tokens,
        "auto, or a whole number of tokens, 0 or more",
        "Fewer tokens than this are computed rather than imported; 0 means one block. With auto, "
        "what is estimated to be computed sooner, 256 before there are estimates; an engine that "
        "finds everything elsewhere computes one import in 64 as a check, in eight at first.",
    )
    drain_budget_ms: float = _setting(
        1.0,
        _milliseconds,
        "a number of milliseconds from 0 to 1000",
        "Longest wait per step for importers of blocks about to be reused; "
        "unless set, 0 without asynchronous scheduling.",
    )
    max_import_blocks: int = _setting(
        16384,
        _whole_number(1),
        "a whole number of blocks, 1 or more",
        "Most blocks imported for one request, in each KV cache group. "
        "With windows or several groups, a prompt that needs more is computed.",
    )
    share: Share = _one_of(
        Share.ALL,
        "Whose blocks are shared: every request's, only those with a cache_salt, nobody's. "
        "Only vLLM's hooks know which have one: other engines share nothing with salted-only.",
    )
    verify: bool = _flag("Checksum blocks when published and compare after each import.")
    staging: bool = _flag(
        "Copy through host memory between GPUs that cannot reach each other, "
        "instead of leaving them unshared."
    )
    transport: str = _setting(
        Auto.AUTO,
        _transport,
        "auto, or the name of an installed transport",
        "How blocks travel: with auto, by kvshm's own transport for the device of the KV cache; "
        "else by this one, which another package may have installed. Engines with different "
        "transports do not share.",
    )
    log_level: str = _setting(
        "INFO", _log_level, "debug, info, warning or error", "Least severe level that is logged."
    )
    log_format: LogFormat = _one_of(
        LogFormat.TEXT, "How kvshm's lines are written: as text, or each as one JSON object."
    )
    log_file: str = _setting(
        "",
        _absolute_path,
        "an absolute path",
        "File to which kvshm's lines are appended, instead of vLLM's log or the coordinator's "
        "stderr. Several processes may share it.",
    )
    beside: bool = _flag(
        "Share also on an engine that has a connector of its own, in a MultiConnector with it."
    )
    allow_untested_vllm: bool = _flag(
        "Share on versions of vLLM that kvshm has not been tested with."
    )
    fault: Fault | None = _setting(
        None,
        Fault,
        "wrong-block, zero or shift",
        "Make each import wrong in this way, to see that the fault is noticed.",
        for_tests=True,
    )
    strict: bool = _flag(
        "Raise errors at the border to vLLM instead of treating them as a cache miss.",
        for_tests=True,
    )
    given: frozenset[str] = frozenset()
    """Names of the settings that the environment sets."""
    limits: tuple[Limit, ...] = ()
    """Internal: what limits the role in addition to the settings, vLLM's configuration."""
    warnings: tuple[str, ...] = ()
    """Likely mistakes that do not stop the start; to be logged once."""

    def __post_init__(self) -> None:
        for setting in SETTINGS:
            value = getattr(self, setting.field)
            if value is not setting.default:
                value = _parse(setting, f"Config({setting.field}=...)", _spelled(value))
                object.__setattr__(self, setting.field, value)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str], options: Mapping[str, str | None] | None = None
    ) -> Config:
        """Return the checked settings.  Pure.  Raises ConfigError naming setting, value and remedy.

        ``options`` of a command line override the settings of the same name (--run-dir overrides
        KVSHM_RUN_DIR) unless they are None.
        """
        syncpoints.trigger_in(environ)
        timing.timing_in(environ)
        given = {s.name: (s.name, environ.get(s.name, "")) for s in SETTINGS}
        for option, text in (options or {}).items():
            if text is not None:
                name = PREFIX + option.removeprefix("--").replace("-", "_").upper()
                given[name] = option, text
        values = {s.field: _parse(s, *given[s.name]) for s in SETTINGS if given[s.name][1]}
        config = cls(
            **values,
            given=frozenset(s.name for s in SETTINGS if s.field in values),
            warnings=_unknown_names(environ) + _no_plugin(environ, values.get("enable", False)),
        )
        _check_length(config, given["KVSHM_RUN_DIR"][0])
        return config

    def decide_role(self, *found: Limit) -> Decision:
        """Internal: decide what the engine does.  ``found``: limits that only a running vLLM
        shows."""
        nobody = self.share is Share.NONE
        settings = (
            Limit(f"KVSHM_SHARE={self.share}", no_exports=nobody, no_imports=nobody),
            Limit(
                f"KVSHM_ROLE={self.role}",
                no_exports=self.role is Role.CONSUMER,
                no_imports=self.role is Role.PRODUCER,
            ),
        )
        return decide_role((*settings, *self.limits, *found))

    @property
    def imports(self) -> bool:
        """Internal: whether what is known before the engine runs permits importing."""
        return not self.decide_role().no_imports

    def step_budget_ms(self, asynchronous: bool) -> float:
        """Internal: drain budget of one step.  Without asynchronous scheduling no work overlaps the
        wait, so the budget is 0 unless the setting was given."""
        wanted = asynchronous or "KVSHM_DRAIN_BUDGET_MS" in self.given
        return self.drain_budget_ms if wanted else 0.0


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(PREFIX + f.name.upper(), f.name, default=f.default, **f.metadata)
    for f in fields(Config)
    if f.metadata
)


def list_settings(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return every setting: its name, its value ("unset" if there is none) and the origin of the
    value.  Raises ConfigError like ``Config.from_env``."""
    config = Config.from_env(environ)
    told = []
    for setting in SETTINGS:
        value, origin = getattr(config, setting.field), "default"
        if setting.name in config.given:
            origin = "environment"
        elif setting.field == "run_dir":
            value = choose_run_directory("", environ)
            if environ.get("XDG_RUNTIME_DIR", "").startswith("/"):
                origin = "XDG_RUNTIME_DIR"
        told.append((setting.name, _as_text(value), origin))
    return told


def _spelled(value: object) -> str:
    """A program's value as the environment would have it."""
    if isinstance(value, bool):
        return str(int(value))
    return str.__str__(value) if isinstance(value, str) else str(value)


def _parse(setting: Setting, called: str, text: str) -> Any:
    try:
        return setting.parse(text)
    except (ValueError, KeyError):
        # The parser's own message would only repeat the value.
        raise ConfigError(
            f"{called}={text!r} is not {setting.accepts}; correct it, or unset it for "
            f"the default ({_as_text(setting.default)})"
        ) from None


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "unset" if value in (None, "") else str(value)


def _check_length(config: Config, called: str) -> None:
    """Raise ConfigError if socket paths in the run directory would be too long."""
    room = SOCKET_PATH_BYTES - SOCKET_NAME_BYTES - len(config.namespace) - 2
    if (length := len(os.fsencode(config.run_dir))) > room:
        raise ConfigError(
            f"{called}={config.run_dir!r} has {length} bytes, at most {room} leave room "
            f"for a socket of namespace {config.namespace!r}; choose a shorter path"
        )


def _no_plugin(environ: Mapping[str, str], enabled: bool) -> tuple[str, ...]:
    """A warning if VLLM_PLUGINS does not name kvshm: vLLM then does not load the plugin, and no
    process of vLLM reads KVSHM_ENABLE or can warn.  ``kvshm config`` can."""
    plugins = environ.get("VLLM_PLUGINS")
    if not enabled or plugins is None or "kvshm" in plugins.split(","):
        return ()
    return (
        f"VLLM_PLUGINS={plugins!r} leaves kvshm out, so vLLM does not look at KVSHM_ENABLE; "
        "add kvshm to it",
    )


def _unknown_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A warning for each variable whose name looks like a setting's but is none."""
    known = {s.name for s in SETTINGS} | _READ_ELSEWHERE
    ours = (n for n in environ if n.startswith(PREFIX) and not _KUBERNETES.fullmatch(n))
    return tuple(
        f"{name} is not a setting of kvshm and does nothing; {_remedy(name, known)}"
        for name in sorted(ours)
        if name not in known
    )


def _remedy(name: str, known: set[str]) -> str:
    from difflib import get_close_matches  # only needed for a mistake

    tails = [other.removeprefix(PREFIX) for other in sorted(known)]
    nearest = get_close_matches(name.removeprefix(PREFIX), tails, n=1)
    return f"did you mean {PREFIX}{nearest[0]}?" if nearest else "`kvshm config` lists them all"
