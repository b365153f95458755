# A new version of vLLM is looked at before anything runs with it (docs/versions.md).

SOURCES := .cache/vllm
source_of = $(if $(wildcard $(1)),$(1),$(SOURCES)/vllm-$(1).tar.gz)
needed_source = $(if $(1),$(if $(wildcard $(1)),,$(SOURCES)/vllm-$(1).tar.gz))

.PHONY: vllm-facts vllm-facts-recorded
vllm-facts: $(KVSHM) $(call needed_source,$(FROM)) $(call needed_source,$(TO)) ## which facts differ: FROM=0.32.0 TO=0.33.0, or archives or environments
	@[ -n "$(FROM)" ] && [ -n "$(TO)" ] || { echo "which versions? make vllm-facts FROM=0.32.0 TO=0.33.0" >&2; exit 1; }
	$(PYTHON) docs/vllm_facts.py compare $(call source_of,$(FROM)) $(call source_of,$(TO))

vllm-facts-recorded: $(KVSHM) ## write hooks/vllm/known_sources.json from the environments of all tested versions
	$(PYTHON) docs/vllm_facts.py record .venv $(wordlist 2,9,$(VLLMS:%=.venv-%))

# The newest environment has what building vLLM's metadata asks for (mk/vllm-0.33.mk).
$(SOURCES)/vllm-%.tar.gz:
	$(MAKE) --no-print-directory setup VLLM=$(lastword $(VLLMS))
	mkdir -p $(SOURCES)
	$(call pip_source,$*,.venv-$(lastword $(VLLMS)),download) --no-binary vllm --dest $(SOURCES) vllm==$*
