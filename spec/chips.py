"""GPUs' chips, by their names in words, and what the fastest board of each can do."""

import re

# dense bf16, 1e12 FLOP/s; the data sheets that topologies/nodes/ cites
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100": 989.4,
    "H200": 989.4,
    "GH200": 989.4,
    "B200": 2250.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
    "MI250": 181.05,  # one GCD
    "MI300X": 1307.4,
    "MI325X": 1307.4,
    "MI355X": 2516.6,
}


def chip_of(gpu: str) -> str | None:
    """The chip that a GPU's name names; None where it is none of these."""
    return next((one for one in re.findall(r"[A-Z0-9]+", gpu.upper()) if one in PEAK_TFLOPS), None)
