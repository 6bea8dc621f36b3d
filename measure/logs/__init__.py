"""Output of other tools, read into our tables."""
