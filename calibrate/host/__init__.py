"""What the host takes to issue a step, and how hosts differ."""
