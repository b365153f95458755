"""How the bytes of KV blocks move between processes."""
