"""What an engine sees of kvshm: one object for a node that is joined, and what it returns."""
