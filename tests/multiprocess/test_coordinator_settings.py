"""The coordinator reads the settings of the environment; its options come before them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiprocess

TYPO = {"KVSHM_NAMSPACE": "x", "KVSHM_PORT": "tcp://10.0.0.1:5555"}


def coordinator(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a coordinator that finds no run directory, after it has read its settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVSHM_")}
    command = [sys.executable, "-m", "kvshm.coordinator", "--run-dir", "/no/such/place", *options]
    return subprocess.run(command, env=clean | environ, capture_output=True, text=True)


def test_a_name_that_is_no_setting_is_warned_about() -> None:
    done = coordinator(**TYPO)
    (warning,) = [s for s in done.stderr.splitlines() if "event=unknown-setting" in s]
    assert "level=warning" in warning
    assert "did you mean KVSHM_NAMESPACE?" in warning


@pytest.mark.parametrize(
    ("environ", "options", "warns"),
    [
        ("error", (), False),
        ("warning", (), True),
        ("error", ("--log-level", "warning"), True),
        ("debug", ("--log-level", "error"), False),
    ],
)
def test_the_log_level_is_the_environments_unless_the_option_is_given(
    environ: str, options: tuple[str, ...], warns: bool
) -> None:
    done = coordinator(*options, KVSHM_LOG_LEVEL=environ, **TYPO)
    assert ("unknown-setting" in done.stderr) == warns
    assert done.returncode == 4


def test_a_bad_setting_is_named_with_the_remedy() -> None:
    done = coordinator(KVSHM_LOG_LEVEL="loud")
    assert done.returncode == 2
    assert "KVSHM_LOG_LEVEL='loud' is not debug, info, warning or error; correct it" in done.stderr
    done = coordinator("--namespace", "Foo Bar")
    assert done.returncode == 2
    assert done.stderr.startswith("kvshm-coordinator: --namespace='Foo Bar' is not 1 to 32 of a-z")
    done = coordinator(KVSHM_TEST_TIME_SCALE="fast")
    assert done.returncode == 2
    assert "KVSHM_TEST_TIME_SCALE='fast': wanted a number above 0" in done.stderr
