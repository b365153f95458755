"""Shared memory: its layout, segments, slot tables, and how descriptors of it are handed over."""
