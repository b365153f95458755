# What needs a GPU.  torch with CUDA must be there already; what else is missing is taken from
# dist/gpu, without touching that Python's own packages.  Any Python will do:
#     make verify-gpu GPU_PYTHON=python3.12
# Every step stays below five minutes; the most telling one comes first.

GPU_PYTHON ?= python3
GPU_VERSION ?= 3.12
GPU_WHEELS := pyzmq msgspec xxhash pytest pytest-timeout
GPU_SITE := dist/gpu-site
GPU_PATH := $(CURDIR):$(CURDIR)/examples:$(CURDIR)/$(GPU_SITE)
GPU_BENCH := PYTHONPATH=$(GPU_PATH) timeout --kill-after=10 295 $(GPU_PYTHON)
# Warnings are no errors here: they are those of a torch we did not choose.
GPU_TEST := $(GPU_BENCH) -m pytest -p no:cacheprovider -q -rs -W default --timeout 250
GPU_IMPORTS := import kvshm._native, zmq, msgspec, xxhash, pytest, pytest_timeout
GPU_STEPS := gpu-roundtrip gpu-driver gpu-conformance gpu-bytes gpu-death gpu-peers gpu-demos
GPU_BENCHES := gpu-copy-rates gpu-import-times

.PHONY: gpu-wheels gpu-ready gpu-install verify-gpu test-gpu bench-gpu verify-gpu-vllm \
	$(GPU_STEPS) $(GPU_BENCHES)

gpu-wheels: wheel ## collect in dist/gpu what a GPU machine lacks, for its Python (GPU_VERSION=3.12)
	rm -rf dist/gpu
	$(PYTHON) -m pip download --quiet --python-version $(GPU_VERSION) --only-binary=:all: \
		--dest dist/gpu $(GPU_WHEELS)
	cp dist/kvshm-*.whl dist/gpu

gpu-ready:
	@$(GPU_BENCH) -c '$(GPU_IMPORTS)' 2>/dev/null || $(MAKE) --no-print-directory gpu-install
	@$(GPU_BENCH) -c 'import sys, gpu_memory; sys.exit(gpu_memory.no_gpu())'

gpu-install:
	@ls dist/gpu/kvshm-*.whl >/dev/null 2>&1 || { echo "$(GPU_PYTHON) lacks something of: \
	$(GPU_IMPORTS). Install it, or run 'make gpu-wheels' where a package index is and bring \
	dist/gpu: docs/gpu.md" >&2; exit 1; }
	$(GPU_PYTHON) -m pip install --quiet --upgrade --no-index --find-links dist/gpu \
		--target $(GPU_SITE) kvshm $(GPU_WHEELS)
	cp $(GPU_SITE)/kvshm/_native*.so kvshm/

verify-gpu: ## all of these on a GPU machine, whatever fails; what was seen in gpu-results.txt
	@$(MAKE) --no-print-directory gpu-ready
	@$(MAKE) --no-print-directory --keep-going test-gpu bench-gpu \
		$(shell $(GPU_PYTHON) -c 'import vllm' 2>/dev/null && echo verify-gpu-vllm) 2>&1 \
		| tee gpu-results.txt

test-gpu: $(GPU_STEPS) ## the CUDA transport on real GPUs, several processes; needs no vLLM
$(GPU_STEPS) $(GPU_BENCHES): gpu-ready

gpu-roundtrip:
	$(GPU_TEST) tests/gpu/test_roundtrip.py
gpu-driver:
	$(GPU_TEST) tests/unit/test_cuda_driver.py tests/unit/test_cuda_kernel.py -k "not played"
gpu-conformance:
	$(GPU_TEST) tests/conformance -k "cuda and not played"
gpu-bytes:
	$(GPU_TEST) tests/gpu/test_bytes.py
gpu-death:
	$(GPU_TEST) tests/gpu/test_death.py
gpu-peers:
	$(GPU_TEST) tests/gpu/test_peers.py tests/gpu/test_sanitizer.py
gpu-demos:
	$(GPU_BENCH) examples/two_gpu_demo.py
	$(GPU_BENCH) examples/gpu_prefix_demo.py

bench-gpu: $(GPU_BENCHES) ## copy rates, fixed costs and a prefix import, one JSON line each
gpu-copy-rates:
	$(GPU_BENCH) benchmarks/bench_gpu_copy.py
gpu-import-times:
	$(GPU_BENCH) benchmarks/bench_gpu_import.py
