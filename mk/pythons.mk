# The wheel, built once by the environment's own Python, under others: tests/unit and tests/core run
# from it, not from the tree.  PYTHONS: interpreters, by name or path; unless given, those of
# 3.12 to 3.14 that are here, those among them that only pyenv knows included.

PYTHONS ?= $(shell for version in 3.12 3.13 3.14; do \
	for python in python$$version $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python; do \
		$$python -c 'import sys, venv; print(sys.executable)' 2>/dev/null && break; done; done; true)

.PHONY: test-pythons
test-pythons: $(TOOLS) $(KVSHM) ## tests/unit and tests/core from the wheel; PYTHONS="python3.12 python3.14" chooses
	@[ -n "$(PYTHONS)" ] || { echo "no Python from 3.12 on is here: make PYTHONS=..." >&2; exit 1; }
	PYTHONS="$(PYTHONS)" $(PYTHON) -m pytest -rfEs tests/packaging/test_alone.py \
		-k "needs_neither or runs_the or unit or core"
