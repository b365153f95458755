# What needs a GPU.  Nothing here sets up an environment: torch with CUDA must be there already,
# and the targets run in the Python that has it (make test-gpu GPU_PYTHON=python3.12).
# Every command stays below five minutes; the most telling one comes first.

GPU_PYTHON ?= python3
GPU_BENCH := PYTHONPATH=$(CURDIR):$(CURDIR)/examples $(GPU_PYTHON)
# Warnings are no errors here: they are those of a torch we did not choose.
GPU_TEST := $(GPU_BENCH) -m pytest -p no:cacheprovider -q -rs -W default --timeout 250
GPU_WHEELS := pyzmq msgspec posix-ipc xxhash pytest pytest-timeout

.PHONY: gpu-wheels gpu-ready test-gpu bench-gpu verify-gpu-vllm

gpu-wheels: wheel ## collect in dist/gpu what a GPU machine with Python 3.12 lacks
	$(PYTHON) -m pip download --quiet --python-version 3.12 --only-binary=:all: \
		--dest dist/gpu $(GPU_WHEELS)
	cp dist/kvshm-*.whl dist/gpu

gpu-ready:
	@$(GPU_BENCH) -c 'import kvshm._native, kvshm.transport.cuda_ipc' || \
	{ echo "install kvshm and its requirements into $(GPU_PYTHON) first: docs/gpu.md" >&2; exit 1; }

test-gpu: gpu-ready ## the CUDA transport on real GPUs, several processes; needs no vLLM
	$(GPU_TEST) tests/gpu/test_roundtrip.py
	$(GPU_TEST) tests/unit/test_cuda_driver.py tests/unit/test_cuda_kernel.py
	$(GPU_TEST) tests/conformance -k cuda
	$(GPU_TEST) tests/gpu/test_bytes.py
	$(GPU_TEST) tests/gpu/test_death.py
	$(GPU_TEST) tests/gpu/test_peers.py tests/gpu/test_sanitizer.py
	$(GPU_BENCH) examples/two_gpu_demo.py
	$(GPU_BENCH) examples/gpu_prefix_demo.py

bench-gpu: gpu-ready ## copy rates, fixed costs and a prefix import, one JSON line each
	$(GPU_BENCH) benchmarks/bench_gpu_copy.py
	$(GPU_BENCH) benchmarks/bench_gpu_import.py

verify-gpu-vllm: gpu-ready ## two vLLM engines on GPUs, then the engine tests; needs vLLM with CUDA
	$(GPU_BENCH) examples/vllm_two_engines.py --device cuda $(if $(MODEL),--model $(MODEL))
	$(GPU_TEST) tests/vllm
