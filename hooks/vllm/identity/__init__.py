"""What an engine is: which engines may share with it."""
