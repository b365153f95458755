"""An engine's own copy of the node's prefix index."""
