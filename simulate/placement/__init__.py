"""Which GPU runs which pipeline stage, and how many layers, where speeds differ."""
