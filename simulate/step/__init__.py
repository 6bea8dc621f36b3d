"""A training step: schedule, prices, timeline, clocks, and the estimate of it all."""
