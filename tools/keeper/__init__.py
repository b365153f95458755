"""``kvshm keeper``: an engine that computes nothing, and keeps what others have computed."""
