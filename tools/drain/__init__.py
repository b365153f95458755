"""``kvshm drain``: before an engine is stopped, keepers copy what it alone has."""
