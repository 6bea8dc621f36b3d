"""Simulates a training step from a calibration, and emits it for Astra-Sim."""

from spec.quiet import quiet_interrupt

quiet_interrupt()
