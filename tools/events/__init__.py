"""``kvshm events``: the KV events of a node's engines as one stream."""
