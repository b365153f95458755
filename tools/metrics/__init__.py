"""What the engines' shared memory shows, as metrics for Prometheus."""
