# The documentation as a site, in an environment of its own.

SITE := .venv-site/.site-$(shell cat requirements/site.txt | sha256sum | cut -c1-16)
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' kvshm/version.py)

.PHONY: site site-check
site: $(SITE) ## build the documentation's site in dist/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --quiet --config-file site/mkdocs.yml --site-dir ../dist/site/$(VERSION)
	$(PYTHON3) site/versions.py dist/site

site-check: site $(ENGINE) $(KVSHM) ## the same, then look at it in a browser
	$(PYTHON) -m pytest -rfEs site

$(SITE):
	$(PYTHON3) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/site.txt
	@rm -f .venv-site/.site-* && touch $@
