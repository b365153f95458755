"""``kvshm config``, as a shell runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvshm._base.setting_sources import ORDER
from kvshm.config import SETTINGS
from tests import other_package


def config(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVSHM_", "XDG_"))}
    command = [sys.executable, "-m", "kvshm.tools.cli", "config", *options]
    return subprocess.run(command, env=clean | environ, capture_output=True, text=True)


def test_config_warns_of_a_name_that_is_no_setting() -> None:
    done = config(KVSHM_ROL="consumer", KVSHM_PORT="tcp://10.0.0.1:5555")
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert warning == "kvshm: KVSHM_ROL is not a setting of kvshm and does nothing; " + (
        "did you mean KVSHM_ROLE?"
    )


def test_config_names_a_bad_setting_with_its_remedy() -> None:
    done = config(KVSHM_ROLE="reader")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "kvshm config: KVSHM_ROLE='reader' is not both, producer or consumer; "
        "correct it, or unset it for the default (both)\n"
    )


def test_config_looks_whether_the_transport_is_installed(tmp_path: Path) -> None:
    there = config(KVSHM_TRANSPORT="procfs", PYTHONPATH=str(other_package.install(tmp_path)))
    reported = {name: rest for name, *rest in map(str.split, there.stdout.splitlines())}
    assert (there.returncode, reported["KVSHM_TRANSPORT"]) == (0, ["procfs", "environment"])
    missing = config(KVSHM_TRANSPORT="procfs")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith(
        "kvshm config: KVSHM_TRANSPORT='procfs' is not an installed transport"
    )


@pytest.mark.parametrize("name", ["KVSHM_TEST_SYNC_POINT", "KVSHM_TEST_TIME_SCALE"])
def test_config_checks_what_is_read_at_the_import(name: str) -> None:
    done = config(**{name: "fast"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvshm config: {name}='fast'")
    assert len(done.stderr.splitlines()) == 1
    assert config(**{name: ""}).returncode == 0


def test_config_shows_what_an_engine_with_that_transfer_configuration_would_use(
    tmp_path: Path,
) -> None:
    file = tmp_path / "kvshm.toml"
    file.write_text('role = "producer"\nverify = true\n')
    transfer = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kvshm": {}}}
    transfer["kv_connector_extra_config"] = {"num_threads": 4, "kvshm": {"role": "consumer"}}
    options = ("--json", "--kv-transfer-config", json.dumps(transfer))
    done = config(*options, KVSHM_CONFIG=str(file), KVSHM_SHARE="none", KVSHM_ROL="x")
    assert (done.returncode, done.stderr) == (0, "")
    reported = json.loads(done.stdout)
    assert list(reported["settings"]) == ["KVSHM_CONFIG", *(setting.name for setting in SETTINGS)]
    wanted = {
        "KVSHM_CONFIG": (str(file), "environment"),
        "KVSHM_ROLE": ("consumer", "kv_connector_extra_config"),
        "KVSHM_SHARE": ("none", "environment"),
        "KVSHM_VERIFY": ("1", f"file {file}"),
        "KVSHM_FAULT": (None, "default"),
    }
    for name, (value, origin) in wanted.items():
        assert reported["settings"][name] == {"value": value, "origin": origin}
    (warning,) = reported["warnings"]
    assert warning.startswith("KVSHM_ROL is not a setting")


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        ("{", "--kv-transfer-config='{' is not JSON: "),
        ("[]", "--kv-transfer-config='[]' is not a JSON object; correct it"),
        (
            '{"kv_connector_extra_config": {"rol": 1}}',
            "kv_connector_extra_config: rol is not a setting of kvshm; did you mean role?",
        ),
        (
            '{"kv_connector_extra_config": {"transport": "procfs"}}',
            "kv_connector_extra_config: transport='procfs' is not an installed transport",
        ),
    ],
)
def test_config_refuses_what_would_stop_that_engine(transfer: str, said: str) -> None:
    done = config("--kv-transfer-config", transfer)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvshm config: {said}")
    assert len(done.stderr.splitlines()) == 1


def test_its_help_has_the_order_of_the_sources() -> None:
    lines = config("--help").stdout.splitlines()
    assert [line for line in lines if line.startswith("  ") and line[2].isdigit()] == [
        f"  {place}. {source}" for place, source in enumerate(ORDER, 1)
    ]
