# A router of another project listens to `kvshm events`.  Some 75 MB to download.

ROUTERS := $(call stamp,routers,requirements/routers.txt)

.PHONY: test-routers
test-routers: $(ENGINE) $(KVSHM) $(ROUTERS) ## NVIDIA Dynamo's indexer listens to kvshm events
	$(PYTHON) -m pytest -rfEs -m routers tests/routers

# In a folder of its own, on the path of what needs it only.
$(ROUTERS): | $(ENGINE)
	rm -rf $(VENV)/routers
	$(PIP_INSTALL) --no-deps --target $(VENV)/routers -r requirements/routers.txt
	$(call done,routers)
