"""Tables and pictures out of result files."""
