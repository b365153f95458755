"""The scheduler's half of an engine: what it publishes, plans and leases, epoch by epoch."""
