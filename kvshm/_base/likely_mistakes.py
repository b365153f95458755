"""Variables of an environment that are probably not as their user meant them.  They stop no start;
``Config.mistakes`` has a line for each."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from .core_lines import CoreLine
from .log_lines import FilledLine
from .setting_sources import PREFIX, nearest

# Variables that Kubernetes sets in every pod if there is a Service named "kvshm" or "kvshm-...".
_KUBERNETES = re.compile(r"KVSHM_(\w+_)?(PORT|PORT_\w+|SERVICE_\w+)")


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
