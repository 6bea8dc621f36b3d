"""Kernel models: measured shapes, physics, a learned correction, and how far they are off."""
