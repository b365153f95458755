"""``kvshm top``: what the engines of a node share, second by second."""
