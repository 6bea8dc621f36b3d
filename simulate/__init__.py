"""Simulates a training step from a calibration, and emits it for Astra-Sim.

Its files are commands, and `inputs`, which they share; its folders build on one another, each on
those before it (`tests/test_arrows.py` holds them to that):

    cost          what kernels, communication and the host take, with uncertainty
    hardware      a calibration made to say what was not measured
    step, memory  a training step: schedule, prices, timeline, clocks; what it holds in memory
    plans         which parallelisms fit, and which are worth simulating
    power         energy, heat, what-ifs of caps and cooling
    placement     GPUs of unequal speed
    projection    one request simulated, and what is made of it
    astra         the same step for Astra-Sim, and its timing rules as an engine of ours
    validation    measured steps and sealed forecasts beside their simulation
    series        published series; twins: steps shrunk to fewer GPUs
"""

import os

from spec.quiet import quiet_interrupt

quiet_interrupt()
# Read when numpy is first imported: its matrices are small here, and threads that wait for each
# other cost a projection a quarter of its processor time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
