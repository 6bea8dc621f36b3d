"""A step shrunk to fewer GPUs, and whether its twin predicts it."""
