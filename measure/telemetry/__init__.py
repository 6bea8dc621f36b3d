"""The sampler of a run: its process, the handle on it, and the file that its parts become."""
