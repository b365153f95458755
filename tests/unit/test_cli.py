"""The command ``kvshm``, as a shell runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

from kvshm.config import SETTINGS


def kvshm(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVSHM_", "XDG_"))}
    command = [sys.executable, "-m", "kvshm.tools.cli", *arguments]
    return subprocess.run(command, env=clean | environ, capture_output=True, text=True)


def test_config_prints_each_setting_its_value_and_where_it_came_from() -> None:
    done = kvshm("config", KVSHM_ROLE="consumer", XDG_RUNTIME_DIR="/run/user/7", KVSHM_SHARE="")
    assert (done.returncode, done.stderr) == (0, "")
    told = {name: rest for name, *rest in map(str.split, done.stdout.splitlines())}
    assert list(told) == [setting.name for setting in SETTINGS]
    assert told["KVSHM_ROLE"] == ["consumer", "environment"]
    assert told["KVSHM_RUN_DIR"] == ["/run/user/7/kvshm", "XDG_RUNTIME_DIR"]
    assert told["KVSHM_SHARE"] == ["all", "default"]


def test_config_warns_of_a_name_that_is_no_setting() -> None:
    done = kvshm("config", KVSHM_ROL="consumer", KVSHM_PORT="tcp://10.0.0.1:5555")
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert warning == "kvshm: KVSHM_ROL is no setting of kvshm and does nothing; " + (
        "did you mean KVSHM_ROLE?"
    )


def test_config_names_a_bad_setting_with_its_remedy() -> None:
    done = kvshm("config", KVSHM_ROLE="reader")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "kvshm: KVSHM_ROLE='reader' is not both, producer or consumer; "
        "correct it, or unset it for the default (both)\n"
    )


def test_dump_index_gets_the_rest_of_the_command_line() -> None:
    nobody = kvshm("dump-index", "--namespace", f"t{uuid.uuid4().hex[:8]}", "--json")
    assert (nobody.returncode, nobody.stdout.strip()) == (1, '{\n  "namespaces": []\n}')
    assert "usage: dump_index" in kvshm("dump-index", "--help").stdout


def test_a_wrong_command_line_is_told() -> None:
    for wrong in ([], ["dump"], ["config", "--all"]):
        done = kvshm(*wrong)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: kvshm")
