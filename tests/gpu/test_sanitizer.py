"""The kernel under NVIDIA's compute-sanitizer: no access outside of what was allocated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(125)
def test_the_kernel_is_clean_under_compute_sanitizer() -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-W", "default"]
    tests = [sys.executable, "-m", "pytest", "-q", *options, "--timeout", "110"]
    ran = subprocess.run(
        [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *tests,
         "tests/unit/test_cuda_driver.py", "-k", "real and (kernel or stopped)"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
