"""A step at its power cap, on GPUs whose heat is known, for tests of what-ifs and of power."""

from pathlib import Path
from typing import Any

from simulate.power.whatif import WhatIf, change
from simulate.projection.projected import Request, project
from spec.calibration import Calibration
from spec.model import load_model
from spec.parallelism import Parallelism
from tests.made_up import calibration_json, write_calibration
from topologies import load_fabric, load_node

NODE, FABRIC = load_node("hgx-h200"), load_fabric("ndr400-rail")
MODEL = load_model("llama3-8b").resized(layers=4)
P = Parallelism(dp=16, overlap=True, microbatch=2, global_batch=64)
THERMAL = {
    "fast_s": 0.9,
    "slow_s": 30.0,
    "central": {"fast_c_per_w": 0.036, "slow_c_per_w": 0.006},
    "resistance_sd": 0.1,
    "rest_c": 27.0,
    "rest_sd_c": 1.5,
    "error_c": 1.5,
    "power_w": 700.0,
}


def write_at_cap(path: Path) -> Calibration:
    """Write the calibration to `path` and read it back."""
    clock = calibration_json()["clock"] | {"sustained_mhz": 1600.0, "product_bend": 0.5}
    return write_calibration(path, thermal=THERMAL, clock=clock)


def request(calibration: Calibration, path: Path, what: WhatIf) -> Request:
    changed = change(what, calibration, NODE)
    return Request(MODEL, P, NODE, FABRIC, changed.calibration, path, draws=60, changed=changed)


def value_of(calibration: Calibration, path: Path, what: WhatIf) -> dict[str, Any]:
    return project(request(calibration, path, what)).as_json()
