"""kvshm.hooks.transformers rests on the public surface alone, and no one else imports it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "hooks" / "transformers"
MODULES = sorted(FOLDER.glob("*.py"))


def test_it_imports_nothing_of_kvshm_but_the_surface(subtests: pytest.Subtests) -> None:
    for path in MODULES:
        with subtests.test(path=path):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    assert node.module == "kvshm.api" or not str(node.module).startswith("kvshm")
                elif isinstance(node, ast.Import):
                    assert not [
                        alias.name for alias in node.names if alias.name.startswith("kvshm")
                    ]


def test_kvshm_alone_imports_no_engine() -> None:
    code = (
        "import sys, kvshm; "
        "print(*{'torch', 'transformers', 'vllm', 'kvshm.hooks'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
