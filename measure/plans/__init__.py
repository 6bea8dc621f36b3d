"""What to measure, as data."""
