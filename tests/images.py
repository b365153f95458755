"""deploy/Dockerfile built without a daemon, over stand-ins for its bases, and containers of it."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
CACHE = ROOT / ".cache" / "image"
RELEASE, PACKAGES = "bookworm", "ca-certificates,python3,python3-dev,python3-pip,python3-venv"
DEVICES = ("null", "zero", "random", "urandom")

Command = list[str]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout.strip()


def bases() -> list[str]:
    """The images that the Dockerfile begins with."""
    text = DOCKERFILE.read_text("utf-8")
    given = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    names = re.findall(r"^FROM \$\{(\w+)\}", text, re.MULTILINE)
    assert len(names) == len(re.findall(r"^FROM ", text, re.MULTILINE)) == 2
    return [given[name] for name in names]


def pips_settings() -> tuple[str, set[str]]:
    """pip's settings of this machine as a file, and the files and folders that they name."""
    settings, named = {}, set()
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = ast.literal_eval(value)
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # The files of an index lie beside it.
            named.add(str(path if path.is_file() or str(path) == word else path.parent))
    lines = (f"{name} = {value}" for name, value in settings.items())
    return "\n".join(["[global]", *lines, ""]), named


class Store:
    """Images in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        places = ("--root", str(folder / "images"), "--runroot", str(folder / "run"))
        self._buildah = ("buildah", *places)

    def buildah(self, *arguments: str) -> str:
        return run(*self._buildah, *arguments)

    def make_stand_ins(self) -> None:
        """Debian with Python under the names of the bases, which are in registries only: the
        Dockerfile builds here as it is, and nothing shows how it fits vLLM's own image."""
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, str(debian()), "/")
        # Python's own images, and vLLM's, have no such file, and call Python so.
        script = "rm -f /usr/lib/python3*/EXTERNALLY-MANAGED; ln -s python3 /usr/bin/python"
        self.buildah("run", "--isolation", "chroot", container, "--", "sh", "-c", script)
        # As vLLM's image has it, and labels of what it stands on itself.
        self.buildah("config", "--entrypoint", '["vllm", "serve"]', container)
        self.buildah("config", "--label", "org.opencontainers.image.version=22.04", container)
        first, *others = bases()
        self.buildah("commit", "--quiet", container, first)
        self.buildah("rm", container)
        for other in others:
            self.buildah("tag", first, other)

    def build(self, tag: str) -> None:
        """pip has what this machine's pip has; none of it gets into the image."""
        text, named = pips_settings()
        settings = self.folder / "pip.conf"
        settings.write_text(text)
        mounts = {f"{path}:{path}:ro" for path in named} | {f"{settings}:/etc/pip.conf:ro"}
        volumes = [word for mount in sorted(mounts) for word in ("--volume", mount)]
        how = ("--isolation", "chroot", "--pull-never", *volumes)
        self.buildah("bud", *how, "--file", str(DOCKERFILE), "--tag", tag, ".")

    def config(self, tag: str) -> dict[str, Any]:
        about: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", tag))
        config: dict[str, Any] = about["OCIv1"]["config"]
        return config

    def unpack(self, tag: str) -> Path:
        """A folder with what the image holds, which lasts as long as the store."""
        return Path(self.buildah("mount", self.buildah("from", "--pull-never", tag)))

    def remove(self) -> None:
        self.buildah("rm", "--all")
        run("rm", "-rf", self.folder)


def debian() -> Path:
    """Made once."""
    what = hashlib.sha256(f"{RELEASE} {PACKAGES}".encode()).hexdigest()[:16]
    archive = CACHE / f"debian-{what}.tar"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partly = archive.with_suffix(".new.tar")
        options = ("--quiet", "--variant=minbase", f"--include={PACKAGES}")
        run("mmdebstrap", *options, RELEASE, partly)
        partly.rename(archive)
    return archive


def container(root: Path, config: dict[str, Any], binds: dict[str, Path]) -> Command:
    """Run a command as a container of this image would under Kubernetes' "restricted": as the
    image's user, without capabilities and a way to get some, with namespaces of its own, no network
    and a root that is read-only but for /tmp, $HOME, /dev/shm and ``binds``."""
    environ = dict(word.split("=", 1) for word in config["Env"])
    user, group = config["User"].split(":")
    place = shlex.quote(str(root))
    empty = ("/tmp", "/dev/shm", environ["HOME"])
    lines = [
        "set -e",
        f"mount --bind {place} {place}",
        f"mount -t tmpfs -o mode=0755 tmpfs {place}/dev",
        f"mkdir -p {place}/dev/shm",
        *(f"touch {place}/dev/{it}; mount --bind /dev/{it} {place}/dev/{it}" for it in DEVICES),
        *(f"mount -t tmpfs -o mode=1777 tmpfs {place}{path}" for path in empty),
        f"mount -t proc proc {place}/proc",
        *(f"mount --bind {shlex.quote(str(of))} {place}{path}" for path, of in binds.items()),
        f"mount -o remount,bind,ro {place}",
        # Not exec: the first process of the namespace, with which all others end, must be root's,
        # since a process that changes its user is not killed with its parent any more.
        f'chroot {place} "$@"; exit $?',
    ]
    namespaces = ("--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
    apart = ["unshare", *namespaces, "sh", "-c", "\n".join(lines), "sh"]
    identity = (f"--reuid={user}", f"--regid={group}", "--clear-groups")
    nothing = ("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
    return [*apart, "setpriv", *identity, *nothing, "env", "-i", *config["Env"]]
