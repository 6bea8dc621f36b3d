"""Fits of what was measured: kernels, collectives, network, clock and power, host overhead.

Its folders build on one another in this order: `network`, `host`, `clock`, `kernels`; `fit`,
`judge` and `diff` are commands, other files are what all of these share.
"""

from spec.quiet import quiet_interrupt

quiet_interrupt()
