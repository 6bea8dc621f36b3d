"""A made-up calibration in closed form, for tests of the simulator. Nothing here was measured."""

from pathlib import Path
from typing import Any

from spec.calibration import Calibration, read_calibration
from spec.collective import COLLECTIVES, busbw_factor
from spec.files import write_json
from spec.kernel import OPS
from spec.kernel_fit import features

COMPUTE_BOUND = ("gemm", "ragged_gemm", "grouped_gemm", "attention", "ragged_attention")

# what a host takes on Transformer Engine
ON_ENGINE = {
    "te_part_us": 12.0,
    "te_backward_part_us": 8.0,
    "te_checkpoint_us": 30.0,
    "te_ring_us": 40.0,
    "te_exchange_us": 30.0,
    "te_adapter_us": 20.0,
    "te_expert_us": 90.0,
    "te_backward_expert_us": 150.0,
    "te_tensor_us": 3.0,
    "fp8_part_us": 15.0,
    "fp8_backward_part_us": 10.0,
    "fp8_checkpoint_us": 40.0,
    "fp8_expert_us": 150.0,
    "fp8_backward_expert_us": 200.0,
    "fp8_pass_us": 90.0,
    "fp8_weight_us": 50.0,
    "te_sd": 0.15,
    "fp8_sd": 0.15,
}


def calibration_json(**changes: Any) -> dict[str, Any]:
    """`calibration/1` of an H200 whose every parameter is a round number."""
    kernels = [
        {
            "op": op,
            "direction": direction,
            "dtype": "bf16",
            "launch_us": 3.0,
            "tflops": 650.0 if op in COMPUTE_BOUND else None,
            "gbytes_per_s": 3000.0,
            "clock_exponent": 1.0 if op in COMPUTE_BOUND else 0.0,
            "length_scales": [1.0] * features(op, [(7,) * len(names)]).shape[1],
            "amplitude": 0.05,
            "noise": 0.02,
            # far from every shape that is asked for, on either side of it
            "points": [
                {"dims": [size] * len(names), "time_us": 3.0, "sd": 0.01} for size in (7, 7 << 60)
            ],
            "host_us": 0.5,
            "active_power_w": 800.0 if op in COMPUTE_BOUND else 350.0,
        }
        for op, (names, directions) in OPS.items()
        for direction in directions
    ]
    collectives = [
        {
            "collective": kind,
            "curves": [
                {
                    "ranks": ranks,
                    "points": [
                        {
                            "bytes": 2**power,
                            "time_us": 12 + 2**power * busbw_factor(kind, ranks) / 360e3,
                            "sd": 0.03,
                        }
                        for power in range(10, 31)
                    ],
                }
                for ranks in (2, 4)
            ],
            "structure_sd": 0.08,
        }
        for kind in COLLECTIVES
    ]
    network = {
        "launch_us": 15.0,
        "latency_us": 8.0,
        "latency_sd": 0.3,
        "efficiency": 0.85,
        "efficiency_sd": 0.1,
        "all_to_all_efficiency": 0.7,
        "scale_sd": 0.05,
        "max_nodes": 8,
        "source": "assumed",
        "detail": "made up",
    }
    clock = {
        "reference_mhz": 1980.0,
        "max_mhz": 1980.0,
        "idle_w": 75.0,
        "power_limit_w": 700.0,
        "power_exponent": 2.4,
        "communication_w": 150.0,
        "waiting_w": 60.0,
        "device_spread_sd": 0.02,
        "visit_sd": 0.02,
    }
    value: dict[str, Any] = {
        "schema": "calibration/1",
        "system": "4x-h200",
        "device": "NVIDIA H200",
        "kind": "nvidia",
        "created": "2026-01-01T00:00:00Z",
        "inputs": [],
        "kernels": kernels,
        "collectives": collectives,
        "networks": [network | {"protocol": name} for name in ("infiniband", "roce", "tcp")],
        "host": {"part_us": 5.0, "step_us": 1000.0, "sd": 0.3} | ON_ENGINE,
        "clock": clock,
        "interference": 0.1,
        "composition_sd": 0.05,
        "parameters": [],
        "held_out": [],
    }
    return value | changes


def write_calibration(path: Path, **changes: Any) -> Calibration:
    """Write the made-up calibration to `path` and read it back."""
    write_json(path, calibration_json(**changes))
    return read_calibration(path)
