"""Activation by a setting: vLLM calls ``activate`` in each of its processes.

If enabled, kvshm registers its connector with vLLM, and every engine configuration that names no
connector gets it; with KVSHM_BESIDE=1 also one that names another.  An engine whose user names
kvshm's connector in ``--kv-transfer-config`` does not need ``activate``.
"""

from __future__ import annotations

import math
import os
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any

from kvshm._base.core_lines import CoreLine
from kvshm._base.log import LogLimit, logger
from kvshm._base.log_lines import FilledLine

from ..log_lines import HookLine
from .transfer_config import (
    CONNECTOR,
    CONNECTOR_MODULE,
    beside,
    combination_refusal,
    ensure_recompute,
    register,
    with_connector,
)

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from kvshm.config import Config

log = logger("kvshm")

TOUCHPOINT = "_post_init_kv_transfer_config"

_STARTED_BY_VLLM = ("EngineCore", "VllmWorker", "ApiServer")
"""Names of processes that get a configuration which was made before they were started."""

_log_limit = LogLimit(math.inf)


def activate() -> None:
    """Entry point ``vllm.general_plugins``: offer kvshm to vLLM if KVSHM_ENABLE, or the file that
    KVSHM_CONFIG names, is set so; otherwise import and change nothing.

    Any vLLM process, any number of times.  Raises ConfigError for a bad setting, which stops
    vLLM's start.
    """
    enable = os.environ.get("KVSHM_ENABLE", "")
    if enable == "0":
        return
    if not (enable or os.environ.get("KVSHM_CONFIG")):
        _say_what_is_misspelt()
        return
    from kvshm._base.log_output import start_log
    from kvshm.config import Config
    from kvshm.errors import ConfigError
    from kvshm.interfaces import check_installed

    from .admission import admit

    config = Config.from_env(os.environ)
    if not config.enable:
        return
    start_log(config.log_level, config.log_format, config.log_file)
    try:
        reason = admit(config.untested).refusal
        if reason is None:
            check_installed(config.transport, config.called("transport"))
            register()
            _wrap()
    except ConfigError:
        raise
    except Exception as exc:  # any: if vLLM has changed, the engine serves unshared
        from .declining import unexpected

        reason = unexpected(exc)
    if reason is not None:
        _decline(reason, config)


def _say_what_is_misspelt() -> None:
    """Log each variable that looks like a setting and is none: KVSHM_ENABLED, say.  Imports nothing
    if there is no variable of kvshm."""
    if not any(name.startswith("KVSHM_") for name in os.environ):
        return
    try:
        from kvshm.config import misspelt

        from . import settings

        settings.misspelt_are_told = True
        for line in misspelt(os.environ):
            _log_once(line)
    except Exception:  # any: an engine that does not use kvshm has nothing to do with its faults
        return


def _wrap() -> None:
    """Wrap the method in which vLLM derives connectors from other settings."""
    from functools import wraps

    from vllm.config import VllmConfig

    from kvshm.errors import ConfigError

    from .imports.request_span import announce_request_spans

    original = getattr(VllmConfig, TOUCHPOINT, None)
    if original is None:
        _decline(
            f"this vLLM has no VllmConfig.{TOUCHPOINT}; --kv-transfer-config with "
            f"kv_connector_module_path={CONNECTOR_MODULE} still works"
        )
        return
    if getattr(original, "kvshm", False):
        return

    @wraps(original)
    def post_init(self: VllmConfig) -> None:
        original(self)
        if self.observability_config.otlp_traces_endpoint is not None:
            announce_request_spans()
        try:
            _configure(self)
        except ConfigError:
            raise
        except Exception as exc:  # any, as above
            from .declining import unexpected

            _decline(unexpected(exc))

    post_init.kvshm = True  # type: ignore[attr-defined]  # marks kvshm's wrapper
    setattr(VllmConfig, TOUCHPOINT, post_init)


def _configure(vllm_config: VllmConfig) -> None:
    """Add kvshm's connector to an engine's kv_transfer_config, or correct it where it is there.  A
    config without a connector that cannot be used is dropped: it was meant for kvshm.  If this
    raises, nothing has changed.  Raises ConfigError for a bad setting."""
    from kvshm._base.log_output import start_log

    from .settings import settings_of

    transfer = vllm_config.kv_transfer_config
    config = settings_of(transfer)
    if vllm_config.model_config is not None:  # else of no engine, see below
        # vLLM has configured its log since ``activate``.
        start_log(config.log_level, config.log_format, config.log_file)
        for warning in config.mistakes:
            _log_once(warning)
    if transfer is not None and transfer.has_connector(CONNECTOR):
        if overridden := ensure_recompute(transfer):
            _log_once(overridden)
        return
    if vllm_config.model_config is None:
        return  # no engine: vLLM builds such configurations for its own use
    other = transfer if transfer is not None and transfer.kv_connector is not None else None
    if reason := _refusal(vllm_config, other, config):
        _decline(reason, config, vllm_config)
        if other is None:  # vLLM does not start with a configuration that names no connector
            vllm_config.kv_transfer_config = None
        return
    # Not above: where it cannot be imported, the returns above must still come.
    from .shutdown import prepare_shutdown

    combined = with_connector(transfer, config) if other is None else beside(other)
    prepare_shutdown(config)  # so that this process, too, cleans up where the engine's files lie
    vllm_config.kv_transfer_config = combined
    if other is not None:
        _log_once(HookLine.BESIDE.fill(other.kv_connector))
    _log_once(HookLine.INSTALLED.fill())


def _refusal(vllm_config: VllmConfig, other: KVTransferConfig | None, config: Config) -> str | None:
    """Return why this engine gets no connector, or None."""
    if (unbuilt := native_refusal()) is not None:
        return unbuilt
    from .identity.refusals import config_refusal

    if other is not None and not config.beside:
        return f"kv_transfer_config names {other.kv_connector}; KVSHM_BESIDE=1 shares beside it"
    return (
        config.decide_role().refusal
        or config_refusal(vllm_config, os.environ, config.transport)
        or touchpoint_refusal()
        or (combination_refusal(vllm_config, other) if other is not None else None)
    )


def touchpoint_refusal() -> str | None:
    """Return what kvshm does not know of vLLM's interface for connectors, or None.  Imports the
    connector.  Raises ConfigError for a bad setting."""
    from kvshm.errors import ConfigError

    if (unbuilt := native_refusal()) is not None:
        return unbuilt
    try:
        from .connector import KvshmConnector
    except ConfigError:
        raise
    except ImportError as exc:
        return f"this vLLM is not as kvshm knows it: {exc}"
    except Exception as exc:  # any: its class is made of what vLLM has
        from .declining import unexpected

        return unexpected(exc)
    unknown = ", ".join(sorted(getattr(KvshmConnector, "__abstractmethods__", ())))
    return f"this vLLM requires connectors to have {unknown}" if unknown else None


def native_refusal() -> str | None:
    """Return why kvshm's C code cannot be imported, or None."""
    try:
        from kvshm import _native as _native
    except ImportError as exc:  # not built, as in a clone, or built from other sources
        return f"the kvshm that Python finds is not built: {exc}"
    return None


def _decline(reason: str, config: Config | None = None, vllm_config: Any = None) -> None:
    """Say it, and leave it for tools if the settings are known: once, in the process that starts
    the others."""
    _log_once(CoreLine.NOT_SHARING.fill(reason))
    if config is not None and not current_process().name.startswith(_STARTED_BY_VLLM):
        from .declining import record_engine

        record_engine(reason, config, vllm_config)


def _log_once(line: FilledLine) -> None:
    """Log a line once per engine: vLLM builds its configuration several times, and first in the
    process that starts the others."""
    if current_process().name.startswith(_STARTED_BY_VLLM):
        return
    if _log_limit.allows(line):
        log.filled(line)
