"""Fits of what was measured: kernels, collectives, network, clock and power, host overhead."""
