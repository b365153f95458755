"""What this engine computes and shows to others."""
