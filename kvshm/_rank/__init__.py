"""The worker's half of an engine, one per rank: carries out loads."""
