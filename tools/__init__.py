"""Shows what a running or crashed node has in shared memory, and clears up after a crash."""
