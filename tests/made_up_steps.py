"""Made-up training steps on a made-up system, whose errors are known. Nothing here was measured."""

from collections.abc import Sequence
from pathlib import Path

from simulate.validation.cases import predict
from spec.files import write_json, write_table
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.training_records import StepRow, TrainingConfig, TrainingRow
from tests.made_up import write_calibration
from tests.synthetic import Truth, manifest
from topologies import load_fabric, load_node

MODEL = load_model("llama3-8b").resized(layers=4, seq_len=2048)
SPLITS = (
    {},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 4, "sequence_parallel": True},
    {"pp": 2, "global_batch": 8},
    {"dp": 2, "global_batch": 8, "overlap": True},
    {"tp": 2, "dp": 2, "sequence_parallel": True, "global_batch": 8},
)
ERROR = 0.04  # every made-up measurement is this much slower than its simulation
MANIFEST = manifest("4x-h200", "run-1", 4, Truth(), "2030-01-01T00:00:00Z")
DEVICES = [one.uuid_hash for one in MANIFEST.hosts[0].devices]


def configs() -> list[TrainingConfig]:
    return [
        TrainingConfig.of(f"case-{i}", MODEL, Parallelism.model_validate(fields))
        for i, fields in enumerate(SPLITS)
    ]


def write_run(system: Path, rows: Sequence[TrainingRow]) -> None:
    """The result set `run-1` of a system: these rows, each with one step that took its median."""
    folder = system / "run-1"
    write_table(folder / "training.csv", TrainingRow, rows)
    steps = [
        StepRow(case_id=row.case_id, role="judge", step=0, step_time_s=row.step_time_median_s or 1)
        for row in rows
    ]
    write_table(folder / "steps.csv", StepRow, steps)
    write_json(folder / "manifest.json", MANIFEST.model_dump(mode="json", by_alias=True))


def write_slower_steps(system: Path) -> None:
    """A calibration, and training steps that all took `ERROR` longer than simulated with it."""
    calibration = write_calibration(system / "calibration.json")
    node, fabric = load_node("hgx-h200"), load_fabric("ndr400-rail")
    rows = []
    for config in configs():
        predicted = predict(config, calibration, node, fabric, draws=20)
        assert predicted.power_w is not None
        assert predicted.clock_mhz is not None
        step = predicted.step_time_s["median"] * (1 + ERROR)
        fields = config.model_dump() | {
            "status": "done",
            "framework": "made up",
            "steps": 10,
            "step_time_median_s": step,
            "energy_per_step_j": predicted.energy_j["median"] * 1.1,
            "power_mean_w": predicted.power_w["median"] * 1.05,
            "clock_mean_mhz": predicted.clock_mhz["median"] / 1.02,
            "peak_allocated_gib": f"{predicted.allocated_gib},1.0",
        }
        rows.append(TrainingRow.model_validate(fields))
    write_run(system, rows)
