"""``kvshm indexer``: tells routers which engine holds how much of a prefix."""
