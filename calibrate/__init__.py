"""Fits of what was measured: kernels, collectives, network, clock and power, host overhead."""

from spec.quiet import quiet_interrupt

quiet_interrupt()
