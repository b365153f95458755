"""kvshm-coordinator: the one process that knows every engine of a node, and no block."""
