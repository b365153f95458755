# The example of prefill and decode engines behind a proxy.

.PHONY: disaggregated-prefill
disaggregated-prefill: $(ENGINE) $(KVSHM) ## a prefill and a decode engine behind a proxy; ARGS="--serve" keeps them up
	PYTHONPATH=examples $(PYTHON) -P -m disaggregated_prefill $(ARGS)
