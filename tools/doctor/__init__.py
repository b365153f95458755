"""``kvshm doctor``: checks of a node, each with its remedy, and what a bug report needs."""
