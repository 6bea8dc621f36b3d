"""Made-up rows of published series, and the files they come in. Nothing here was measured."""

import csv
import io
from math import exp
from pathlib import Path

import numpy as np

from simulate.series.fit import around
from simulate.series.plan import plan
from simulate.series.rows import SeriesRow
from simulate.series.step import Calibrations
from spec.calibration import Calibration

# A row that prints everything; what a test changes it names.
WHOLE = {
    "row_id": "a",
    "pair_id": "p",
    "source": "some/where README.md",
    "model": "Llama 3 8B",
    "layers": "8",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn_hidden": "14336",
    "vocab": "32000",
    "seq_len": "2048",
    "global_batch": "64",
    "micro_batch": "1",
    "gpus": "8",
    "gpu_type": "H200",
    "tp": "2",
    "pp": "2",
    "vpp": "1",
    "cp": "1",
    "sharding": "ZeRO-1",
    "sequence_parallel": "yes",
    "recompute": "none",
    "precision": "bf16",
    "flags": "--overlap-grad-reduce",
    "metric": "step_time_s",
    "value": "1.0",
    "interconnect": "8x 400Gb/s per node",
}


def row(**changes: str) -> SeriesRow:
    return SeriesRow(WHOLE | changes)


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    names = list(dict.fromkeys(name for one in rows for name in one))
    text = io.StringIO()
    lines = csv.DictWriter(text, names, restval="")
    lines.writeheader()
    lines.writerows(rows)
    path.write_text(text.getvalue())
    return path


def simulated(calibration: Calibration, one: SeriesRow, shift: float = 0.0) -> str:
    """The step time of a row whose kernels take exp(shift) as long."""
    value, _, _ = around(plan(one), Calibrations(calibration), np.array([shift, 0, 0, 0, 0]))
    return repr(exp(value))
