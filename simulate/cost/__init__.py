"""What the pieces of a step cost: kernels, communication, the host, with uncertainty."""
