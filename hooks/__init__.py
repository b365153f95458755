"""Where vLLM meets kvshm: the only place that imports vllm."""
