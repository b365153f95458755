"""The worker's half of an engine, one per rank: carries loads out, and copies."""
