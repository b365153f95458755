"""``kvshm serve``: the node, live in a browser."""
