"""The import of a request's blocks from other engines."""
