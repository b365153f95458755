"""Everything that knows vLLM: the only place that imports vllm."""
