"""Checks of the machine, of its limits and of the run directory."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvshm._ground.rundir import open_run_directory, require_room
from kvshm._shm.available_memory import available_bytes
from kvshm.errors import RunDirectoryError

from .facts import Facts
from .findings import Check, Told, absent, ok, problem, warning

MIB = 1 << 20
SHM_BYTES = 160 * MIB
"""Free in /dev/shm: without it vLLM's CPU server does not start (0.32)."""
LITTLE_MEMORY = 1024 * MIB
DESCRIPTORS = 1024
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "fuse.sshfs"}
"""Kinds of file systems on which sockets lead nowhere from another machine, or not at all."""
NVIDIA_SMI_SECONDS = 10.0
REGULAR_UID = 1000
"""systemd removes IPC objects of users from this uid on (SYS_UID_MAX + 1)."""


def _shared_memory(facts: Facts) -> Iterator[Told]:
    path = facts.root / "dev/shm"
    found = os.statvfs(path)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"/dev/shm has {free // MIB} of {size // MIB} MiB free"
    if not os.path.ismount(path):
        remedy = "mount a tmpfs there (docker: --shm-size)"
        yield warning(f"{text}, and is no mount of its own: it may lie on a disk", remedy)
    if free < SHM_BYTES:
        remedy = (
            f"vLLM needs {SHM_BYTES // MIB} MiB there (docker: --shm-size=1g); kvshm needs none"
        )
        yield problem(text, remedy)
    else:
        yield ok(f"{text} (for vLLM; kvshm needs none)")


def _memory(facts: Facts) -> Iterator[Told]:
    free = available_bytes(facts.root / "proc", facts.root / "sys/fs/cgroup")
    text = f"{free // MIB} MiB of memory are available here, container limits included"
    if free < LITTLE_MEMORY:
        yield warning(text, "free memory: slot tables and indexes that do not fit are not shared")
    else:
        yield ok(text)


def _sealed_memory(_: Facts) -> Iterator[Told]:
    fd = os.memfd_create("kvshm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        try:
            os.ftruncate(fd, 0)
        except PermissionError:
            yield ok("memory can be made, sealed and handed on")
        else:
            remedy = "use another kernel or sandbox: a process could cut memory that others read"
            yield problem("a seal does not keep memory from being cut", remedy)
    finally:
        os.close(fd)


def _descriptors(_: Facts) -> Iterator[Told]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"this shell's processes may open {soft} files, {hard} if they ask"
    if soft < DESCRIPTORS:
        yield warning(text, f"ulimit -n {DESCRIPTORS} or more, also where engines are started")
    else:
        yield ok(text)


def _run_directory(facts: Facts) -> Iterator[Told]:
    path = facts.run_dir
    if not os.path.lexists(path):
        yield absent(f"{path} does not exist: no coordinator or engine has made it yet")
        return
    try:
        open_run_directory(str(path), facts.environ)
        require_room(path, facts.namespace or "default")
    except RunDirectoryError as exc:
        yield problem(str(exc), "do what it says")
        return
    kind = _file_system(path, facts.root / "proc/self/mountinfo")
    if kind in REMOTE:
        remedy = "set KVSHM_RUN_DIR to a directory on this machine, such as /run/kvshm"
        yield problem(f"{path} is on a network file system ({kind})", remedy)
    else:
        yield ok(f"{path} is this user's alone, on {kind}")


def _file_system(path: Path, mountinfo: Path) -> str:
    """The kind of the file system that holds a path."""
    mounted = {}
    for line in mountinfo.read_text().splitlines():
        left, _, right = line.partition(" - ")
        where = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split(" ")[4])
        mounted[where] = right.split(" ")[0]
    place = Path(os.path.realpath(path))
    return next(mounted[str(p)] for p in (place, *place.parents) if str(p) in mounted)


def _remove_ipc(facts: Facts) -> Iterator[Told]:
    if not (facts.root / "run/systemd/system").is_dir():
        yield absent("systemd does not run here")
        return
    if os.geteuid() < REGULAR_UID:
        yield ok("a system user's files in /dev/shm stay when a session ends")
        return
    conf = facts.root / "etc/systemd"
    files = [conf / "logind.conf", *sorted((conf / "logind.conf.d").glob("*.conf"))]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    (*_, said) = [None, *re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", text, re.MULTILINE)]
    if said is not None and said.lower() in ("no", "0", "false", "off"):
        yield ok("RemoveIPC=no: files in /dev/shm stay when a session ends")
        return
    remedy = "RemoveIPC=no in logind.conf, loginctl enable-linger, or run engines as a system user"
    told = (
        "when this user's last session ends, systemd removes vLLM's files in /dev/shm (RemoveIPC)"
    )
    yield warning(f"{told}; kvshm has none there", remedy)


def _mig_and_mps(facts: Facts) -> Iterator[Told]:
    if (program := shutil.which("nvidia-smi", path=facts.environ.get("PATH"))) is None:
        yield absent("there is no nvidia-smi, so no NVIDIA GPU that engines could use")
        return
    done = subprocess.run(
        [program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False
    )
    if done.returncode:
        remedy = "look at the driver: engines on GPUs cannot run"
        yield problem(f"nvidia-smi -L ended with status {done.returncode}", remedy)
        return
    gpus = re.findall(r"^GPU \d+", done.stdout, re.MULTILINE)
    parts = re.findall(r"^\s+MIG ", done.stdout, re.MULTILINE)
    if parts:
        remedy = "engines of one MIG instance can share; between instances CUDA opens no memory"
        yield warning(f"{len(gpus)} GPUs in {len(parts)} MIG instances", remedy)
    else:
        yield ok(f"{len(gpus)} GPUs, no MIG")
    for process in facts.processes:
        if where := process.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
            remedy = "use one MPS server for all engines that are to share, or none"
            yield warning(f"process {process.pid} uses an MPS server at {where}", remedy)


CHECKS = (
    Check("shared memory", "size, room and mount of /dev/shm", _shared_memory),
    Check("memory", "memory that is free, within the limits of containers", _memory),
    Check("sealed memory", "whether the kernel seals memory (memfd)", _sealed_memory),
    Check("open files", "how many descriptors processes may have", _descriptors),
    Check(
        "run directory", "owner, mode, length and file system of the run directory", _run_directory
    ),
    Check("RemoveIPC", "whether systemd removes files of /dev/shm while engines run", _remove_ipc),
    Check("MIG and MPS", "partitioned and multiplexed GPUs", _mig_and_mps),
)
