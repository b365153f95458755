# docs/sglang.md rests on SGLang's source, which nothing here installs: the tests fetch a wheel to read.

.PHONY: sglang-facts
sglang-facts: $(TOOLS) $(KVSHM) ## what docs/sglang.md says of SGLang, in its wheel; SGLANG=0.5.24: in that version's
	SGLANG=$(SGLANG) $(PYTHON) -m pytest -q tests/unit/test_sglang_facts.py
