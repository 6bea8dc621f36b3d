"""Which parallelisms fit a cluster, and which of them are worth simulating."""
