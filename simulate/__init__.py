"""Simulates a training step from a calibration, and emits it for Astra-Sim."""

import os

from spec.quiet import quiet_interrupt

quiet_interrupt()
# Read when numpy is first imported: its matrices are small here, and threads that wait for each
# other cost a projection a quarter of its processor time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
