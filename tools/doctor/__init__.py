"""``kvshm doctor``: checks of a machine and of the engines on it, each with a remedy."""
