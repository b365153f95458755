"""Windows onto a running, or a crashed, node, read-only; and what clears up after a crash."""
