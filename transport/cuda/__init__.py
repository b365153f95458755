"""How KV blocks in the memory of CUDA GPUs get from one process to another."""
