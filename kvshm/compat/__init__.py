"""Calls that earlier systems offered their engines, above kvshm.api: docs/compat.md."""
