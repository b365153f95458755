# What needs a GPU.  torch with CUDA must be there already; what else is missing is taken from
# dist/gpu, without touching that Python's own packages.  Any Python will do:
#     make verify-gpu GPU_PYTHON=python3.12
# benchmarks/gpu_suite.py runs the steps, and needs no make:  python3 benchmarks/gpu_suite.py a
# A part takes at most eight minutes, on 16 cores and one H100 or H200; its results are appended to
# files in the folder KVSHM_GPU_RESULTS, if that is set.

GPU_PYTHON ?= python3
GPU_VERSION ?= 3.12
GPU_WHEELS := pyzmq msgspec xxhash pytest pytest-timeout
GPU_SUITE := $(GPU_PYTHON) benchmarks/gpu_suite.py
GPU_STEPS := roundtrip driver conformance host bytes death keeper peers sanitizer mps namespaces stalls \
	import-times copy-rates copy-ways

.PHONY: gpu-wheels gpu-prepare gpu-ready verify-gpu test-gpu bench-gpu rehearse-gpu \
	gpu-parts gpu-a gpu-b gpu-c gpu-d gpu-e gpu-demos $(GPU_STEPS:%=gpu-%)

gpu-wheels: wheel ## collect in dist/gpu what a GPU machine lacks, for its Python (GPU_VERSION=3.12)
	rm -rf dist/gpu
	$(PYTHON) -m pip download --quiet --python-version $(GPU_VERSION) --only-binary=:all: \
		--dest dist/gpu $(GPU_WHEELS)
	cp dist/kvshm-*.whl dist/gpu

gpu-prepare: gpu-wheels gpu-vllm-bundle ## have everything ready for a GPU machine without a package index

gpu-ready:
	$(GPU_PYTHON) benchmarks/gpu_ready.py

# For the runs of vLLM, too.
verify-gpu gpu-parts: export KVSHM_GPU_RESULTS := $(or $(KVSHM_GPU_RESULTS),gpu-results)
verify-gpu: ## all of these on a GPU machine, whatever fails; results in the folder gpu-results
	@$(MAKE) --no-print-directory --keep-going gpu-parts \
		$(shell { test -d dist/gpu-vllm || $(GPU_PYTHON) -c 'import vllm'; } 2>/dev/null \
		&& echo verify-gpu-vllm)

gpu-parts:
	$(GPU_SUITE) a b c d e
gpu-a: ## round trip, driver, conformance, every byte: plain memory and VMM memory
	$(GPU_SUITE) a
gpu-b: ## deaths, demos, imports beside decoding, stalls while memory is attached
	$(GPU_SUITE) b
gpu-c: ## copy rates, idle and beside decoding, and beside other ways to copy
	$(GPU_SUITE) c
gpu-d: ## namespaces, two GPUs, compute-sanitizer, MPS
	$(GPU_SUITE) d
gpu-e: ## host memory of a keeper
	$(GPU_SUITE) e

test-gpu: ## the CUDA transport on real GPUs, several processes; needs no vLLM
	$(GPU_SUITE) roundtrip driver conformance bytes death keeper peers sanitizer demo prefix-demo
bench-gpu: ## copy rates, imports and stalls, one JSON line each
	$(GPU_SUITE) copy-rates copy-ways import-times stalls
gpu-demos:
	$(GPU_SUITE) demo prefix-demo
$(GPU_STEPS:%=gpu-%): gpu-%:
	$(GPU_SUITE) $*

rehearse-gpu: $(ENGINE) $(KVSHM) ## the Python of all GPU steps, without a GPU: small, over the played driver
	$(PYTHON) -m tests.played_cuda.rehearse $(PARTS)
