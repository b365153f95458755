"""The node as its shared memory shows it: read again and again, judged, compared."""
