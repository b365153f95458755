"""Prefill and decode engines of one machine that share KV by kvshm alone, behind a proxy."""
