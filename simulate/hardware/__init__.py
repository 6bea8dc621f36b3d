"""A calibration made to say what was not measured: other GPUs, boards, switches, number formats."""
