# What benchmarks/suite.py lists, and the pages that state what it has found, as `make docs` writes
# them: also of runs that have failed, which the page says.

define suite
failed=0; $(PYTHON) benchmarks/suite.py $(1) || failed=$$?; \
	$(MAKE) --no-print-directory docs || failed=$$?; exit $$failed
endef

.PHONY: bench bench-peers bench-full bench-peers-needs
bench: $(ENGINE) $(KVSHM) ## what kvshm costs and brings, in ten minutes, and the page of it
	$(call suite,quick)

bench-peers: bench-peers-needs $(ENGINE) $(KVSHM) $(LMCACHE) $(MOONCAKE) ## the same beside LMCache and Mooncake, over loopback only; needs root or user namespaces
	$(call suite,peers)

bench-full: $(ENGINE) $(KVSHM) $(LMCACHE) ## what takes long: users, four engines, restarts, faults
	$(call suite,full)

bench-peers-needs:
	@echo "beside kvshm run, each in a folder of its own in $(VENV):"
	@grep -h == requirements/lmcache.txt requirements/mooncake.txt
	@echo "which need libibverbs1, librdmacm1, libnuma1 and liburing2 of the system, and the commands unshare and ip"
