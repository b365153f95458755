"""Every setting of kvshm: its name, what it accepts, its default and its unit.

Only ``Config.from_env`` reads and checks them; a bad value stops the start, an empty one is unset.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

from ._base import setting_sources, syncpoints, timing
from ._base import setting_values as values
from ._base.log_lines import FilledLine
from ._base.roles import Decision, Limit, Role, decide_role
from ._base.rundir import SOCKET_PATH_BYTES, choose_run_directory
from ._base.setting_sources import FILE_VARIABLE, PREFIX, Given, Loaded, Source
from .errors import ConfigError

SOCKET_NAME_BYTES = 32
"""Bytes of a socket's path for its name, in addition to the namespace."""

_READ_ELSEWHERE = frozenset({FILE_VARIABLE, syncpoints.VARIABLE, timing.VARIABLE})
"""Variables that are no settings.  The last two are read before there are settings."""

_PLACE = ("run_dir", "namespace")


class Share(StrEnum):
    ALL = "all"
    SALTED_ONLY = "salted-only"
    NONE = "none"


class Fault(StrEnum):
    """A deliberate fault, by which tests show that the verification notices it."""

    WRONG_BLOCK = "wrong-block"
    ZERO = "zero"
    SHIFT = "shift"


class LogFormat(StrEnum):
    """How a line of the log is written."""

    TEXT = "text"
    JSON = "json"


class Auto(StrEnum):
    """A value that the engine determines itself."""

    AUTO = "auto"


class Setting(NamedTuple):
    """One setting; ``parse`` raises ValueError or KeyError."""

    name: str
    """Of its environment variable, by which messages call the setting."""
    field: str
    default: Any
    parse: Callable[[str], Any]
    accepts: str
    meaning: str
    for_tests: bool


def _auto_or_tokens(text: str) -> int | Auto:
    return Auto.AUTO if text == Auto.AUTO else values.whole_number(0)(text)


def _setting(
    default: Any, parse: Callable[[str], Any], accepts: str, meaning: str, for_tests: bool = False
) -> Any:
    """A field of Config that is a setting.  SETTINGS is made from these."""
    about = {"parse": parse, "accepts": accepts, "meaning": meaning, "for_tests": for_tests}
    return field(default=default, metadata=about)


def _flag(meaning: str, for_tests: bool = False, default: bool = False) -> Any:
    accepts = "0 or 1 (or no, false, off; yes, true, on)"
    return _setting(default, values.boolean, accepts, meaning, for_tests)


def _one_of(default: StrEnum, meaning: str) -> Any:
    *most, last = type(default)
    return _setting(default, type(default), f"{', '.join(most)} or {last}", meaning)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one process; docs/configuration.md lists them.  Any process; immutable.

    The constructor takes each by its name in small letters without ``KVSHM_``, as in
    ``Config(run_dir="/run/kvshm", role="producer")``; it raises ConfigError.
    """

    enable: bool = _flag("Share this engine's prefix cache.")
    run_dir: str = _setting(
        "",
        values.absolute_path,
        "an absolute path",
        "Directory of the sockets; unless set $XDG_RUNTIME_DIR/kvshm, else /tmp/kvshm-<uid>, "
        "or one in $HOME if that name is taken by another user.",
    )
    namespace: str = _setting(
        "default",
        values.namespace,
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
        values.number(0, 1000),
        "a number of milliseconds from 0 to 1000",
        "Longest wait per step for importers of blocks about to be reused; "
        "unless set, 0 without asynchronous scheduling.",
    )
    join_wait_ms: float = _setting(
        1000.0,
        values.number(0, 600_000),
        "a number of milliseconds from 0 to 600000",
        "Longest wait of kvshm.join(), and under vLLM of a request that comes while the engine "
        "joins, until the engines that are there are known; not without a coordinator.",
    )
    max_import_blocks: int = _setting(
        16384,
        values.whole_number(1),
        "a whole number of blocks, 1 or more",
        "Most blocks imported for one request, in each KV cache group. "
        "With windows or several groups, a prompt that needs more is computed.",
    )
    share: Share = _one_of(
        Share.ALL,
        "Whose blocks are shared: every request's, only those with a cache_salt, no request's. "
        "Only vLLM's hooks know which have one: other engines share nothing with salted-only.",
    )
    duplicates_first: bool = _flag(
        "Reuse blocks that another engine has, too, before the last copies of others; else in "
        "vLLM's order. Only vLLM's hooks do: other engines choose themselves.",
        default=True,
    )
    verify: bool = _flag("Checksum blocks when published and compare after each import.")
    staging: bool = _flag(
        "Copy through host memory between GPUs that cannot reach each other, "
        "instead of leaving them unshared."
    )
    weights_check_seconds: float = _setting(
        5.0,
        values.number(0.1, 3600),
        "a number of seconds from 0.1 to 3600",
        "How often an engine that shares looks at samples of all its weights: in that time it "
        "notices that somebody has written them without a call that announces it.",
    )
    read_only_calls: str = _setting(
        "",
        values.method_names,
        "names of methods, separated by commas",
        "Methods of your worker extension that never write weights. vLLM's collective_rpc calls of "
        "all others, and of callables, end what is shared, and all weights are digested anew.",
    )
    transport: str = _setting(
        Auto.AUTO,
        values.transport,
        "auto, or the name of an installed transport",
        "How blocks travel: with auto, by kvshm's own transport for the device of the KV cache; "
        "else by this one, which another package may have installed. Engines with different "
        "transports do not share.",
    )
    log_level: str = _setting(
        "INFO",
        values.log_level,
        "debug, info, warning or error",
        "Least severe level that is logged.",
    )
    log_format: LogFormat = _one_of(
        LogFormat.TEXT, "How kvshm's lines are written: as text, or each as one JSON object."
    )
    log_file: str = _setting(
        "",
        values.absolute_path,
        "an absolute path",
        "File to which kvshm's lines are appended, instead of vLLM's log or the coordinator's "
        "stderr. Several processes may share it.",
    )
    trust_item_ids: bool = _flag(
        "Take the identifiers that vLLM or a client gives images, videos and audios for their "
        "contents, which are digested otherwise. A client that gives two images the same one then "
        "makes other engines answer wrongly. Engines with another value do not share."
    )
    beside: bool = _flag(
        "Share also on an engine that has a connector of its own, in a MultiConnector with it; of "
        "a prompt the longer prefix is loaded."
    )
    untested: bool = _flag(
        "Share also on a vLLM that differs from the tested ones in what kvshm relies on: answers "
        "may then be wrong."
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
    _loaded: Loaded = field(default=Loaded(), compare=False, repr=False)
    """What the loader knows of them; ``dataclasses.replace`` keeps it.  Not for callers."""

    def __post_init__(self) -> None:
        for setting in SETTINGS:
            value = getattr(self, setting.field)
            if value is not setting.default:
                value = _parse(setting, f"Config({setting.field}=...)", values.spelled(value))
                object.__setattr__(self, setting.field, value)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str],
        options: Mapping[str, str | None] | None = None,
        extra_config: Mapping[str, object] | None = None,
    ) -> Config:
        """Return the checked settings.  Blocks while it reads the file that KVSHM_CONFIG names.
        Raises ConfigError naming setting, value and remedy.

        ``options`` of a command line (--run-dir), unless None, and ``extra_config``, kvshm's part
        of vLLM's kv_connector_extra_config, override variables.
        """
        syncpoints.trigger_in(environ)
        timing.timing_in(environ)
        known = [setting.field for setting in SETTINGS]
        file = setting_sources.read_file(environ)
        setting_sources.refuse_unknown(file.keys, file.path, known)
        config = cls._of(
            setting_sources.of_options(options or {}),
            setting_sources.of_extra_config(extra_config or {}, known),
            setting_sources.of_environment(environ, known),
            setting_sources.of_file(file),
        )
        left_out = setting_sources.plugin_left_out(environ) if config.enable else ()
        return config._with(mistakes=(*misspelt(environ), *left_out))

    @classmethod
    def of_place(
        cls, environ: Mapping[str, str], options: Mapping[str, str | None] | None = None
    ) -> Config:
        """Internal: as ``from_env``, but only for run directory and namespace."""
        return cls._of(
            setting_sources.of_options(options or {}),
            setting_sources.of_environment(environ, _PLACE),
            setting_sources.only(
                _PLACE, setting_sources.of_file(setting_sources.read_file(environ))
            ),
        )

    @classmethod
    def _of(cls, *sources: Source) -> Config:
        """Return what counts of ``sources``, checked.  Raises ConfigError."""
        given = setting_sources.merged(*sources)
        read = {s.field: _read(s, given[s.field]) for s in SETTINGS if s.field in given}
        config = cls(**read)._with(sources={field: given[field] for field in read})
        _check_length(config)
        return config

    def with_limits(self, *limits: Limit) -> Config:
        """Internal: return these settings, of an engine whose role is limited by ``limits`` too."""
        return self._with(limits=limits)

    def _with(self, **loaded: Any) -> Config:
        new = copy(self)
        object.__setattr__(new, "_loaded", self._loaded._replace(**loaded))
        return new

    @property
    def given(self) -> frozenset[str]:
        """Names of the settings that are given; the others have their defaults."""
        return frozenset(PREFIX + field.upper() for field in self.sources)

    @property
    def sources(self) -> Mapping[str, Given]:
        """Internal: where the given ones come from, by field."""
        return self._loaded.sources

    @property
    def mistakes(self) -> tuple[FilledLine, ...]:
        """Internal: likely mistakes that do not stop the start; to be logged once."""
        return self._loaded.mistakes

    def called(self, field: str) -> str:
        """Internal: what messages call the setting ``field``, so that their readers find it."""
        return self.sources[field].called if field in self.sources else PREFIX + field.upper()

    def decide_role(self, *found: Limit) -> Decision:
        """Internal: decide what the engine does, with the limits ``found`` in a running vLLM."""
        none = self.share is Share.NONE
        settings = (
            Limit(f"{self.called('share')}={self.share}", no_exports=none, no_imports=none),
            Limit(
                f"{self.called('role')}={self.role}",
                no_exports=self.role is Role.CONSUMER,
                no_imports=self.role is Role.PRODUCER,
            ),
        )
        return decide_role((*settings, *self._loaded.limits, *found))

    @property
    def warnings(self) -> tuple[str, ...]:
        """The texts about likely mistakes."""
        return tuple(map(str, self.mistakes))

    def step_budget_ms(self, asynchronous: bool) -> float:
        """Internal: drain budget of one step; 0 if no work overlaps the wait, unless given."""
        wanted = asynchronous or "KVSHM_DRAIN_BUDGET_MS" in self.given
        return self.drain_budget_ms if wanted else 0.0


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(PREFIX + f.name.upper(), f.name, default=f.default, **f.metadata)
    for f in fields(Config)
    if f.metadata
)


def misspelt(environ: Mapping[str, str]) -> Iterator[FilledLine]:
    """Internal: yield a line for each variable that looks like a setting and is none."""
    names = {setting.name for setting in SETTINGS} | _READ_ELSEWHERE
    return setting_sources.unknown_names(environ, names)


def list_settings(
    environ: Mapping[str, str], extra_config: Mapping[str, object] | None = None
) -> list[tuple[str, str | None, str]]:
    """Return name, value (None: unset) and origin of every setting.  Raises ConfigError."""
    config = Config.from_env(environ, extra_config=extra_config)
    file = setting_sources.file_of(environ)
    listed = [(FILE_VARIABLE, file or None, "environment" if file else "default")]
    for setting in SETTINGS:
        value, origin = getattr(config, setting.field), "default"
        if setting.field in config.sources:
            origin = config.sources[setting.field].origin
        elif setting.field == "run_dir":
            value = str(choose_run_directory("", environ))
            if environ.get("XDG_RUNTIME_DIR", "").startswith("/"):
                origin = "XDG_RUNTIME_DIR"
        text = None if value in (None, "") else values.as_text(value)
        listed.append((setting.name, text, origin))
    return listed


def _read(setting: Setting, given: Given) -> Any:
    """Return the checked value that a source gives.  Raises ConfigError."""
    try:
        text = values.spelled_native(given.value, switch=setting.default is False)
    except ValueError:
        raise _refused(setting, given.called, given.value) from None
    return _parse(setting, given.called, text)


def _parse(setting: Setting, called: str, text: str) -> Any:
    try:
        return setting.parse(text)
    except (ValueError, KeyError):
        raise _refused(setting, called, text) from None


def _refused(setting: Setting, called: str, value: object) -> ConfigError:
    try:
        shown = repr(value)
    except ValueError:  # an int with more digits than Python writes
        shown = f"({type(value).__name__})"
    # The parser's own message would only repeat the value.
    return ConfigError(
        f"{called}={shown} is not {setting.accepts}; correct it, or unset it for "
        f"the default ({values.as_text(setting.default)})"
    )


def _check_length(config: Config) -> None:
    """Raise ConfigError if socket paths in the run directory would be too long."""
    room = SOCKET_PATH_BYTES - SOCKET_NAME_BYTES - len(config.namespace) - 2
    if (length := len(os.fsencode(config.run_dir))) > room:
        raise ConfigError(
            f"{config.called('run_dir')}={config.run_dir!r} has {length} bytes, at most {room} "
            f"leave room for a socket of namespace {config.namespace!r}; choose a shorter path"
        )
