"""Everything that knows vLLM 0.32: the only place that imports vllm."""
