"""Device memory of a training step."""
