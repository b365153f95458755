# Two nodes, in network namespaces of this machine, and one Mooncake Store between them.  Needs root,
# and the system's libibverbs1, librdmacm1, libnuma1 and liburing2.

MOONCAKE := $(call stamp,mooncake,requirements/mooncake.txt)

.PHONY: test-beyond
test-beyond: $(ENGINE) $(KVSHM) $(LMCACHE) $(MOONCAKE) ## two nodes and a Mooncake Store; needs root
	$(PYTHON) -m pytest -rfEs -m beyond tests/beyond

# In a folder of its own, on the path of what needs it only.
$(MOONCAKE): | $(ENGINE)
	rm -rf $(VENV)/mooncake
	$(PIP_INSTALL) --no-deps --target $(VENV)/mooncake -r requirements/mooncake.txt
	$(call done,mooncake)
