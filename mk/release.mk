# What is uploaded to a package index.  In an environment of its own: nothing of it is needed to run
# or test kvshm.

RELEASE_PYTHON := .venv-release/bin/python
RELEASE := .venv-release/.release-$(shell cat requirements/release.txt | sha256sum | cut -c1-16)

.PHONY: release release-check
release: $(RELEASE) ## build the source archive and the wheels of the commit in dist/release
	$(RELEASE_PYTHON) release/build.py dist/release

release-check: release $(ENGINE) $(KVSHM) ## what an index and its users expect of it, on each Python that is here
	$(PYTHON) -m pytest -rs --durations=5 release
	KVSHM_RELEASED_WHEEL="$$(echo $(CURDIR)/dist/release/*x86_64.whl)" PYTHONS="$(PYTHONS)" \
		$(PYTHON) -m pytest -rs tests/packaging -k "needs_neither or runs_the or unit or core or contents or beside"

$(RELEASE):
	$(PYTHON3) -m venv .venv-release
	$(RELEASE_PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements/release.txt
	@rm -f .venv-release/.release-* && touch $@
