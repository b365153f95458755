"""What ``kvshm up`` prints, for machines of every kind."""

from __future__ import annotations

import shlex
from configparser import ConfigParser

import pytest
import yaml

from kvshm.tools.up import FORMS, SYSTEM_DIR, Engine, Machine, engines

ODD = "a model's $HOME 100% \"\\"


def started(machine: Machine, model: str = "m") -> list[Engine]:
    return engines(model, machine, {"KVSHM_RUN_DIR": SYSTEM_DIR})


def test_the_command_is_the_one_that_this_vllm_has() -> None:
    wheel = Machine([], [0, 1], ("python", "-m", "vllm.entrypoints.openai.api_server", "--model"))
    for each in started(wheel):
        assert each.command[:5] == [*wheel.vllm, "m"]
    assert started(Machine([], [0, 1]))[0].command[:3] == ["vllm", "serve", "m"]


@pytest.mark.parametrize(
    ("machine", "parts"),
    [
        (
            Machine(["0", "1", "2"], [0]),
            [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}],
        ),
        (Machine(["0"], [0, 1]), [{}, {}]),
        (Machine([], [0, 1, 2, 3, 4]), [{"VLLM_CPU_OMP_THREADS_BIND": c} for c in ("0,1", "2,3")]),
        (Machine([], [2, 5]), [{"VLLM_CPU_OMP_THREADS_BIND": c} for c in ("2", "5")]),
        (Machine([], [7]), [{"VLLM_CPU_OMP_THREADS_BIND": "7"}] * 2),
    ],
    ids=["GPUs", "one GPU", "cores", "two cores", "one core"],
)
def test_engines_take_what_the_machine_has(machine: Machine, parts: list[dict[str, str]]) -> None:
    for each, part in zip(started(machine), parts, strict=True):
        assert each.variables["KVSHM_ENABLE"] == "1"
        assert part.items() <= each.variables.items()
        has_gpus = "CUDA_VISIBLE_DEVICES" in each.variables
        assert has_gpus == ("CUDA_VISIBLE_DEVICES" in part)
        assert ("--gpu-memory-utilization" in each.command) == (len(machine.gpus) == 1)
    ports = [each.command[each.command.index("--port") + 1] for each in started(machine)]
    assert len(set(ports)) == 2


TWO_CORES = Machine([], [0, 1])


def printed(
    form: str, model: str = ODD, machine: Machine = TWO_CORES, run_dir: str = SYSTEM_DIR
) -> str:
    place = {"KVSHM_RUN_DIR": run_dir}
    return "\n".join(FORMS[form](engines(model, machine, place), place))


def test_a_shell_reads_the_lines_as_they_are_meant() -> None:
    for line, each in zip(
        printed("shell").splitlines(), started(Machine([], [0, 1]), ODD), strict=True
    ):
        words = shlex.split(line)
        variables = dict(word.split("=", 1) for word in words[: len(each.variables)])
        assert variables == each.variables
        assert words[len(variables) :] == each.command


def test_docker_compose_reads_the_file_as_it_is_meant() -> None:
    services = yaml.safe_load(printed("compose"))["services"]
    assert services.keys() == {"coordinator", "vllm-1", "vllm-2"}
    assert services["coordinator"]["command"] == ["kvshm-coordinator"]
    for each in services.values():
        assert each["environment"]["KVSHM_RUN_DIR"] == SYSTEM_DIR
        assert each["volumes"] == [f"{SYSTEM_DIR}:{SYSTEM_DIR}"]
    assert services["vllm-2"]["command"][2] == ODD.replace("$", "$$")  # compose's own escape
    assert services["vllm-2"]["ports"] == ["127.0.0.1:8002:8002"]


@pytest.mark.parametrize("gpus", [[], ["0"], ["0", "1"]])
def test_containers_get_the_gpus_that_there_are(gpus: list[str]) -> None:
    vllm = ("/opt/my env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model")
    services = yaml.safe_load(printed("compose", "m", Machine(gpus, [0, 1], vllm)))["services"]
    for name in ("vllm-1", "vllm-2"):
        assert services[name].get("gpus") == ("all" if gpus else None)
        assert services[name]["command"][:2] == ["python", "-m"]


@pytest.mark.parametrize("model", ["it's", "'", ";", "a b", "%n", "$HOME", "ünicode", "-"])
def test_a_word_of_a_unit_is_quoted_unless_it_is_plain(model: str) -> None:
    (line,) = (ln for ln in printed("systemd", model).splitlines() if "--port 8001" in ln)
    assert line.count(f'"{model.replace("%", "%%").replace("$", "$$")}"') == (model != "-")


def test_units_have_all_that_systemd_needs() -> None:
    units = printed("systemd").split("# /etc/systemd/system/")[1:]
    assert [unit.partition("\n")[0] for unit in units] == [
        "kvshm-coordinator.service",
        "vllm-1.service",
        "vllm-2.service",
    ]
    for unit in units:
        parser = ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str
        parser.read_string(unit.partition("\n")[2])
        assert parser["Service"]["ExecStart"].startswith("/")
        assert parser["Service"]["User"]
    assert "RuntimeDirectory=kvshm" in units[0]
    assert '"a model\'s $$HOME 100%% \\"\\\\"' in units[1]
    assert 'Environment="KVSHM_RUN_DIR=/run/a $HOME"' in printed("systemd", run_dir="/run/a $HOME")
    assert "RuntimeDirectory" not in printed("systemd", run_dir="/run/a $HOME")
