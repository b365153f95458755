# The models of the protocols need spin and a C compiler, and no environment.

.PHONY: model model-full

model: ## search the models of the protocols; MODEL NOT CHECKED without spin
	$(PYTHON3) -m tests.model.run_models

model-full: ## ... in larger configurations: half an hour, 3 GB
	$(PYTHON3) -m tests.model.run_models --full --jobs 1

GENMC ?= genmc

.PHONY: model-weak
model-weak: ## the C core under weak memory; GENMC=/path/to/genmc
	$(PYTHON3) -m tests.model.run_weak_memory $(GENMC)
