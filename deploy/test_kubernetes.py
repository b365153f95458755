"""deploy/kubernetes as kubectl renders it and Kubernetes' schemas want it: `make deploy-check`."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvshm._shm.layout import NUM_LEASE_BITS, index_bytes, table_bytes
from kvshm.coordinator.bounds import MAX_MEMORY
from kvshm.tools import cli
from tests.multiprocess.sandbox import fresh_tmpfs
from tests.pod_security import departures

ROOT = Path(__file__).parents[1]
NODE = ROOT / "deploy" / "kubernetes" / "node"
POD = ROOT / "deploy" / "kubernetes" / "pod.yaml"
TOOLS = ROOT / ".venv-deploy" / "bin"
VERSIONS = ("1.35", "1.37")
"""The oldest and the newest minor version that Kubernetes supported in December 2026."""
Object = dict[str, Any]


def render(folder: Path) -> list[Object]:
    done = subprocess.run([TOOLS / "kubectl", "kustomize", folder], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), "no error, and nothing that is deprecated"
    return list(yaml.safe_load_all(done.stdout))


def complaints(objects: list[Object], version: str, folder: Path) -> str:
    """What a version of Kubernetes has against these, unknown fields included; "" if nothing."""
    path = folder / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    done = subprocess.run(
        [TOOLS / "kubernetes-validate", "--strict", "--kubernetes-version", version, path],
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert said.count(f"against version {version}") == len(objects), said
    return said if done.returncode else ""


@pytest.fixture(scope="module")
def node() -> list[Object]:
    return render(NODE)


@pytest.fixture
def pods(node: list[Object]) -> dict[str, Object]:
    """The specs of pods, by the kind of what makes them."""
    return pods_of(node)


def pods_of(objects: list[Object]) -> dict[str, Object]:
    made = {each["kind"]: each["spec"] for each in copy.deepcopy(objects) if "spec" in each}
    return {kind: spec["template"]["spec"] for kind, spec in made.items()}


# -- against the schemas


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(node: list[Object], version: str, tmp_path: Path) -> None:
    kinds = [each["kind"] for each in node]
    assert sorted(kinds) == ["ConfigMap", "DaemonSet", "Deployment", "Namespace"]
    assert complaints([*node, yaml.safe_load(POD.read_text("utf-8"))], version, tmp_path) == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_not_valid_is_seen(
    node: list[Object], version: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for place, value in WRONG:
        with subtests.test(place=place):
            broken = copy.deepcopy(node)
            target: Any = next(each for each in broken if each["kind"] == "DaemonSet")
            *within, last = place.split(".")
            for name in within:
                target = target[0] if name == "0" else target[name]
            target[last] = value
            assert last in complaints(broken, version, tmp_path)


WRONG: list[tuple[str, Any]] = [
    ("spec.template.spec.containers.0.securityContext.readOnlyRootFileSystem", True),
    ("spec.template.spec.automountServiceAccountToken", "false"),
    ("spec.template.spec.containers.0.resources.limit", {"memory": "1Gi"}),
    ("spec.template.spec.initContainers.0.command", "install -d"),
    ("spec.replicas", 1),
]


# -- what a user sets


def test_all_that_a_user_sets_stands_in_the_kustomization(tmp_path: Path) -> None:
    """Another image, model and number of engines, and nothing of the old ones is left."""
    folder = shutil.copytree(NODE, tmp_path / "node")
    before, path = render(folder), folder / "kustomization.yaml"
    text = path.read_text("utf-8")
    name, tag, model = re.findall(r"(?:newName: |newTag: |MODEL=)(\S+)", text)
    for old, new in (
        (name, "example/own"),
        (tag, "v9"),
        (model, "a/model"),
        ("count: 2", "count: 3"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)
    after = render(folder)
    assert not re.search(f"IMAGE|{name}|{re.escape(tag)}|{re.escape(model)}", yaml.safe_dump(after))
    for pod in pods_of(after).values():
        for container in pod["initContainers"] + pod["containers"]:
            assert container["image"] == "example/own:v9"
    kinds = {each["kind"]: each for each in after}
    assert kinds["Deployment"]["spec"]["replicas"] == 3
    assert kinds["ConfigMap"]["data"] == {"MODEL": "a/model", "KVSHM_NAMESPACE": "default"}
    (engine,) = pods_of(after)["Deployment"]["containers"]
    assert "$(MODEL)" in engine["command"]
    (given,) = (each for each in engine["env"] if each["name"] == "MODEL")
    wanted = {"name": kinds["ConfigMap"]["metadata"]["name"], "key": "MODEL"}
    assert given["valueFrom"]["configMapKeyRef"] == wanted
    assert wanted["name"] not in {each["metadata"]["name"] for each in before}, "engines restart"


def test_another_model_on_the_same_nodes_is_a_copy(node: list[Object], tmp_path: Path) -> None:
    """In a namespace of Kubernetes and of kvshm: nothing but the nodes' folder is in common."""
    folder = shutil.copytree(NODE, tmp_path / "other")
    path = folder / "kustomization.yaml"
    text = path.read_text("utf-8")
    for old in ("namespace: kvshm", "KVSHM_NAMESPACE=default"):
        assert text.count(old) == 1
        text = text.replace(old, f"{old}-2")
    path.write_text(text)
    other = render(folder)

    def places(objects: list[Object]) -> set[tuple[str, str, str]]:
        of = [(each["kind"], each["metadata"]) for each in objects]
        return {(kind, about.get("namespace", ""), about["name"]) for kind, about in of}

    assert not places(node) & places(other)
    (settings,) = (each for each in other if each["kind"] == "ConfigMap")
    wanted = {"name": settings["metadata"]["name"], "key": "KVSHM_NAMESPACE"}
    assert settings["data"]["KVSHM_NAMESPACE"] == "default-2"
    for pod in pods_of(other).values():
        (container,) = pod["containers"]
        (given,) = (each for each in container["env"] if each["name"] == "KVSHM_NAMESPACE")
        assert given["valueFrom"]["configMapKeyRef"] == wanted


# -- privileges


def test_only_what_a_comment_explains_is_not_restricted(
    node: list[Object], pods: dict[str, Object]
) -> None:
    explained = {
        "pod: volume run is a hostPath",
        "run-directory: runAsUser 0",
        "run-directory: may run as root",
        "run-directory: adds CHOWN",
    }
    assert {kind: departures(pod) for kind, pod in pods.items()} == {
        "DaemonSet": explained,
        "Deployment": explained,
    }
    assert (NODE / "common.yaml").read_text("utf-8").count('Not "restricted":') == 2
    (namespace,) = (each["metadata"] for each in node if each["kind"] == "Namespace")
    level = "pod-security.kubernetes.io/{}".format
    assert namespace["labels"] == {level("enforce"): "privileged", level("warn"): "restricted"}


def test_pods_share_the_run_directory_and_nothing_else(pods: dict[str, Object]) -> None:
    for kind, pod in pods.items():
        assert pod["securityContext"]["runAsUser"] == 1000
        run, *own = pod["volumes"]
        assert run["hostPath"] == {"path": "/run/kvshm", "type": "DirectoryOrCreate"}
        assert all(volume.keys() == {"name", "emptyDir"} for volume in own)
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        written = {"/tmp", "/dev/shm", "/home/kvshm"} if kind == "Deployment" else set()
        assert mounts.keys() == {"/run/kvshm", *written}
        assert len(set(mounts.values())) == len(mounts) == len(pod["volumes"])
        environ = {each["name"]: each.get("value") for each in container["env"]}
        assert environ["KVSHM_RUN_DIR"] == "/run/kvshm/node"
        assert environ.get("KVSHM_ENABLE") == ("1" if kind == "Deployment" else None)


def test_each_pod_makes_the_run_directory_with_what_it_may(pods: dict[str, Object]) -> None:
    """Engines, too: none waits for the coordinator's pod.  Twice, as a node has several pods."""
    first, second = (pod["initContainers"] for pod in pods.values())
    assert first == second
    (maker,) = first
    kept = "".join(f",+{name.lower()}" for name in maker["securityContext"]["capabilities"]["add"])
    lines = [
        "mkdir -m 0755 /run/kvshm",  # as Kubernetes makes a directory of the node
        *[f'setpriv --bounding-set=-all{kept} --inh-caps=-all --no-new-privs "$@"'] * 2,
        "stat -c %a:%u:%g /run/kvshm/node",
    ]
    within = fresh_tmpfs(("/run", "1m"))
    script = ["sh", "-c", " && ".join(lines), "sh", *maker["command"]]
    done = subprocess.run([*within, *script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("700:1000:1000\n", "")


# -- requests and limits


@pytest.fixture(scope="module")
def measured() -> Object:
    """Of few engines with few blocks, so that it takes seconds."""
    options = ("--engines", "2", "--blocks", "1000", "--publish", "1000", "--pause", "1")
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "measure_memory.py", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: Object = json.loads(done.stdout)
    return found


def mib(quantity: str) -> int:
    number, unit = int(quantity[:-2]), quantity[-2:]
    return number * {"Mi": 1, "Gi": 1024}[unit]


def said_of(path: Path, pattern: str) -> list[int]:
    """The numbers in a comment that may go over several lines."""
    text = re.sub(r"\s*\n\s*# ", " ", path.read_text("utf-8"))
    (found,) = re.findall(pattern, text)
    return [int(number.replace(",", "")) for number in found]


def test_a_coordinator_has_what_it_takes(pods: dict[str, Object], measured: Object) -> None:
    (container,) = pods["DaemonSet"]["containers"]
    given = container["resources"]
    path = NODE / "coordinator.yaml"
    _, own = said_of(path, r"With (\d+) engines (\d+) MiB of its own")
    engines, blocks, tables = said_of(
        path, r"(\d+) engines of ([\d,]+) blocks have (\d+) MiB of them"
    )
    now = measured["coordinator"]
    assert now["Anon"] + now["File"] <= own <= mib(given["requests"]["memory"])
    assert engines == NUM_LEASE_BITS
    assert tables == engines * table_bytes(blocks, num_ranks=1) >> 20
    assert (MAX_MEMORY >> 20) + tables <= mib(given["limits"]["memory"])
    assert measured["coordinator_after_a_death"]["Anon"] <= own
    assert "cpu" not in given["limits"], "a slow coordinator makes engines miss events"


def test_an_engine_has_what_kvshm_takes(pods: dict[str, Object], measured: Object) -> None:
    (container,) = pods["Deployment"]["containers"]
    given = container["resources"]
    engines, blocks, own, table, index = said_of(
        NODE / "engines.yaml",
        r"(\d+) engines of ([\d,]+) blocks: (\d+) MiB of its own,.* (\d+) for the slot table and "
        r"(\d+) for an index",
    )
    assert measured["added_to_an_engine"]["Anon"] <= own
    assert table == round(table_bytes(blocks, num_ranks=1) / 2**20)
    capacity = 1 << math.ceil(math.log2((engines - 1) * blocks / 0.75))
    assert index == round(index_bytes(capacity) / 2**20)
    assert own + table + index <= mib(given["requests"]["memory"])
    assert "limits" not in given


def test_one_pod_asks_for_as_much_as_several(pods: dict[str, Object]) -> None:
    coordinator, *engines = yaml.safe_load(POD.read_text("utf-8"))["spec"]["containers"]
    assert coordinator["resources"] == pods["DaemonSet"]["containers"][0]["resources"]
    for engine in engines:
        assert engine["resources"] == pods["Deployment"]["containers"][0]["resources"]


# -- while it runs


def test_probes_ask_of_each_what_may_restart_it(pods: dict[str, Object]) -> None:
    for kind, pod in pods.items():
        (container,) = pod["containers"]
        assert "startupProbe" not in container
        ready = {"path": "/health", "port": "http"} if kind == "Deployment" else None
        assert container.get("readinessProbe", {}).get("httpGet") == ready
        asked = container["livenessProbe"]["exec"]["command"]
        probe = cli.build_parser().parse_args(asked[1:]).probe
        assert probe == ("serving" if kind == "Deployment" else "coordinator")


def test_a_drain_has_time(pods: dict[str, Object]) -> None:
    pod = pods["Deployment"]
    program, *asked = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "kvshm"
    drain = cli.build_parser().parse_args(asked)
    assert drain.command == "drain"
    assert drain.seconds + 5 <= pod["terminationGracePeriodSeconds"]
