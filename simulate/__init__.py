"""Simulates a training step from a calibration, and emits it for Astra-Sim."""
