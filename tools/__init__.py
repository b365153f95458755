"""Read-only windows onto a running, or a crashed, node."""
