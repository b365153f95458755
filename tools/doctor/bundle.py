"""A file for a bug report: what was found, without private data.

Left out or replaced: block hashes, environments but for KVSHM_* and a short list, command lines,
the names of users and of the machine, home directories.
"""

from __future__ import annotations

import io
import json
import os
import platform
import pwd
import re
import resource
import tarfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kvshm.config import SETTINGS
from kvshm.errors import ConfigError

from ..output import Json
from ..report import Filters, build_report
from ..status import as_json as status_of
from .checks import Findings, as_json
from .evidence import Evidence
from .processes import NAMED

HASHES = {"hash", "hashes", "last_hash", "block_hash", "hash_prefix", "blocks", "entries", "chains"}
PACKAGES = ("kvshm", "vllm", "torch", "transformers", "pyzmq", "msgspec", "xxhash")
LIMITS = ("RLIMIT_NOFILE", "RLIMIT_MEMLOCK", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_CORE")
NO_SECRETS = {"default", "engine", "kvshm", "localhost", "node", "root", "vllm"}
"""Names of users and machines that tell nothing, and without which a report tells nothing."""
SHOWN = NAMED - {"HOME"} | {setting.name for setting in SETTINGS} | {"CUDA_VISIBLE_DEVICES"}


def write_bundle(file: Path, seen: Evidence, findings: Findings) -> None:
    """Write the file, of mode 0600.  Raises ConfigError, and then leaves nothing new."""
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise ConfigError(f"--bundle: {file} cannot be made: {exc.strerror}") from exc
    try:
        _write(fd, seen, findings)
    except BaseException as exc:
        file.unlink(missing_ok=True)
        if isinstance(exc, OSError):
            raise ConfigError(f"--bundle: {file} cannot be written: {exc.strerror}") from exc
        raise


def _write(fd: int, seen: Evidence, findings: Findings) -> None:
    redact = redactor(seen.environ)
    with os.fdopen(fd, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, content in _contents(seen, findings):
            plain = json.loads(json.dumps(content, default=str))
            text = json.dumps(_every_text(plain, redact), indent=2).encode()
            entry = tarfile.TarInfo(f"kvshm-doctor/{name}.json")
            entry.size, entry.mode = len(text), 0o600
            archive.addfile(entry, io.BytesIO(text))


def redactor(environ: Mapping[str, str]) -> Callable[[str], str]:
    """Return what replaces home directories, users and the machine's name in a text."""
    homes, users = {environ.get("HOME", "")}, {environ.get("USER", ""), environ.get("LOGNAME", "")}
    for entry in pwd.getpwall():
        if entry.pw_uid == os.getuid() or entry.pw_uid >= 1000:
            homes.add(entry.pw_dir)
            users.add(entry.pw_name)
    machine = platform.node()
    replaced = [(home.rstrip("/"), "~") for home in homes if len(home) > 1]
    replaced += [(user, "USER") for user in users]
    replaced += [(name, "HOST") for name in {machine, machine.partition(".")[0]}]
    rules = [
        (re.compile(rf"(?<![^\W_]){re.escape(secret)}(?![^\W_])"), instead)
        for secret, instead in sorted(replaced, key=lambda rule: -len(rule[0]))
        if secret and secret not in NO_SECRETS
    ]
    rules.append((re.compile(r"(?<=/home/)[^/\"\s]+"), "USER"))

    def redact(text: str) -> str:
        for pattern, instead in rules:
            text = pattern.sub(instead, text)
        return text

    return redact


def _contents(seen: Evidence, findings: Findings) -> Iterator[tuple[str, Any]]:
    yield "doctor", as_json(findings)
    yield "status", _or_why(lambda: status_of(seen.health))
    yield "dump", _or_why(lambda: _dump(seen))
    yield "versions", dict(_versions())
    yield "settings", {n: v for n, v in sorted(seen.environ.items()) if n in SHOWN}
    yield (
        "engines",
        {
            process.pid: {n: v for n, v in sorted(process.environ.items()) if n in SHOWN}
            for process in seen.processes.enabled
        },
    )
    yield (
        "machine",
        {
            "kernel": platform.release(),
            "architecture": platform.machine(),
            "gpus": seen.gpus,
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        },
    )


def _dump(seen: Evidence) -> Json:
    if seen.refused:
        return {}
    report = build_report(seen.run_dir, seen.namespace, Filters())
    shown: Json = _without_hashes(report)
    return shown


def _every_text(value: Any, change: Callable[[str], str]) -> Any:
    """Change each text but keys, which are kvshm's own."""
    if isinstance(value, dict):
        return {key: _every_text(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [_every_text(one, change) for one in value]
    return change(value) if isinstance(value, str) else value


def _without_hashes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_hashes(one) for key, one in value.items() if key not in HASHES}
    return [_without_hashes(one) for one in value] if isinstance(value, list) else value


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "not installed"


def _or_why(make: Callable[[], Json]) -> Json:
    try:
        return make()
    except Exception as exc:  # any: the rest of the bundle is still worth sending
        return {"could not be made": f"{type(exc).__name__}: {exc}"}
