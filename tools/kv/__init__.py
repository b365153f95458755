"""Blocks of a KV cache in a file: written, shown to running engines, compared."""
