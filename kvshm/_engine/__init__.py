"""The scheduler's half of an engine: publishes blocks, plans loads and takes leases."""
