# Real vLLM engines on a GPU machine that has torch 2.11 for CUDA 13 and triton, and no package
# index: what it lacks is cut into parts here and put together there, without touching that Python's
# own packages.  Bring dist/gpu-vllm along with the tree, in several transfers if need be:
#     make gpu-vllm-bundle                         here
#     make verify-gpu-vllm GPU_PYTHON=python3.12   there
# Each run is a target of its own and ends within eight minutes.  Their results are also appended to
# files in the folder KVSHM_GPU_RESULTS, if that is set.

GPU_VLLM_SITE := dist/gpu-vllm-site
# Finds what it needs, and keeps its time limit, by itself.
GPU_VLLM_RUN = $(GPU_PYTHON) benchmarks/gpu_vllm_runs.py --device cuda
GPU_VLLM_PATH = $(CURDIR):$(CURDIR)/$(GPU_VLLM_SITE):$(CURDIR)/dist/gpu-site
GPU_VLLM_RUNS := gpu-vllm-equal gpu-vllm-equal-graphs gpu-vllm-killed gpu-vllm-first-tokens \
	gpu-vllm-steps gpu-vllm-beside gpu-vllm-two-engines
# 8b, 1.5b: of dummy weights.
GPU_SHAPE ?= 8b

.PHONY: gpu-vllm-bundle gpu-vllm-ready verify-gpu-vllm $(GPU_VLLM_RUNS)

gpu-vllm-bundle: wheel ## cut vLLM for a GPU machine's Python (GPU_VERSION=3.12) into parts in dist/gpu-vllm
	$(PYTHON) benchmarks/gpu_vllm_bundle.py --python-version $(GPU_VERSION) \
		--kvshm $$(ls -t dist/kvshm-*.whl | head -1)

gpu-vllm-ready: ## put the parts together on the GPU machine and try them
	$(GPU_PYTHON) benchmarks/gpu_vllm_assemble.py --target $(GPU_VLLM_SITE)

# One run after the other: each needs the GPU for itself.
verify-gpu-vllm: ## two vLLM engines on a GPU: all runs, whatever fails; needs dist/gpu-vllm or vLLM
	@$(MAKE) --no-print-directory gpu-vllm-ready
	@$(MAKE) --no-print-directory --keep-going -j1 $(GPU_VLLM_RUNS)

gpu-vllm-equal:
	$(GPU_VLLM_RUN) equal
gpu-vllm-equal-graphs:
	$(GPU_VLLM_RUN) equal-graphs
gpu-vllm-killed:
	$(GPU_VLLM_RUN) killed
gpu-vllm-first-tokens:
	$(GPU_VLLM_RUN) first-tokens --shape $(GPU_SHAPE)
gpu-vllm-steps:
	$(GPU_VLLM_RUN) steps --shape $(GPU_SHAPE) --lengths 1000,4000,16000
gpu-vllm-beside:
	$(GPU_VLLM_RUN) beside --shape $(GPU_SHAPE) --lengths 10000 --batch 6
gpu-vllm-two-engines:
	PYTHONPATH="$(GPU_VLLM_PATH)" timeout --kill-after=30 440 $(GPU_PYTHON) \
		examples/vllm_two_engines.py --device cuda $(if $(MODEL),--model $(MODEL))
