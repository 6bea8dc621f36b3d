"""The placement suite: does the placement that was predicted to be fastest turn out to be?

One pipeline over all devices, a stage on each. Processes of the symmetric placement run a few steps
first, each pass timed on its device: that is the probe. `python -m simulate.place` reads it and
writes its prediction down, before any other placement has run. Then the predicted placement runs in
processes of its own on the same devices, in turns with the symmetric one: while one runs, the other
waits without using its device. A deliberately uneven placement is compared likewise. Both have
been built when blocks begin, so nothing is started between them.

Written into the run's folder: `placement-probe.json`, `placement-prediction.json`, `placement.csv`
and, at the end, `placement-compared.json`.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from measure.devices import Device
from measure.hosts.window import Window, WindowResult
from measure.store.write import COMPARED, Store, now
from measure.training.plan import TrainingCase, case_of
from measure.training.processes import Processes, Report
from spec.errors import UserError, WorkError
from spec.files import read_json, read_table, write_json
from spec.interval import LEVEL
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.placement_gain import gains
from spec.probe import PREDICTION, PROBE, SCHEMA, PlacementProbe
from spec.training_records import PlacementRow

Name = Literal["symmetric", "optimised", "uneven"]
Turns = Literal["uneven", "optimised"]
Phase = Literal["probe"] | Turns

PROBE_STEPS = 6
SETTLING = 1  # steps at the start of a block that do not count
BLOCK_STEPS = 2  # that do
BLOCKS = {"optimised": 8, "uneven": 3}  # of either placement
BLOCK_S = 60.0  # at least so long is waited for a block, beyond what its steps should take
PREDICT_S = 120.0


@dataclass(frozen=True)
class PlacementCase:
    """A pipeline to place, and how long the comparison takes about."""

    training: TrainingCase
    blocks: dict[str, int]
    seconds: float

    @property
    def case_id(self) -> str:
        """Such as `placement-llama3.2-3b-64-layers-...`."""
        return f"placement-{self.training.case_id}"


def cases(kind: str, devices: int, quick: bool) -> list[PlacementCase]:
    """One pipeline over all devices; none where there is only one.

    On GPUs 16 layers a stage, so that one layer is 6 % of a stage, of a width whose model fits
    twice, and a vocabulary whose head weighs about one layer: with equal GPUs nothing is gained.
    """
    if devices < 2:
        return []
    if kind in ("nvidia", "amd"):
        layers, microbatches, seconds = 16 * devices, 5 * devices // 2, 180.0
        model = load_model("llama3.2-3b").resized(
            name="llama3.2-3b-deep", layers=layers, vocab=32000, seq_len=4096, tied_embeddings=False
        )
    else:
        layers, microbatches, seconds = 4 * devices, 4, 60.0
        model = load_model("tiny").resized(name="tiny-deep", layers=layers, seq_len=128)
    split = Parallelism(pp=devices, global_batch=microbatches)
    blocks = dict.fromkeys(BLOCKS, 2) if quick else BLOCKS
    return [PlacementCase(case_of(model, split, kind, quick=True), blocks, seconds)]


@dataclass
class _Comparison:
    """One case being measured."""

    case: PlacementCase
    devices: Sequence[Device]
    kind: str
    store: Store
    folder: str
    step: int = 0
    block: int = 0
    rows: list[PlacementRow] = field(default_factory=list)
    step_s: float = 1.0  # as last seen

    @contextlib.contextmanager
    def processes(self, layers: Sequence[int], devices: Sequence[int]) -> Iterator[Processes]:
        """Processes that hold this placement, warmed up; gone afterwards."""
        training = self.case.training
        even = len(set(layers)) == 1
        split = training.parallelism.model_copy(
            update={"layers_per_stage": None if even else tuple(layers)}
        )
        placed = replace(training, parallelism=split)
        own = tempfile.mkdtemp(dir=self.folder)
        kind = self.kind.partition(":")[0]
        ranks = Processes(placed, kind, own, [self.devices[one] for one in devices], passes=True)
        try:
            ranks.warmed_up(placed)
            yield ranks
            ranks.send({"bye": True})
            ranks.join(10.0)
        finally:
            ranks.close()

    def run(
        self,
        ranks: Processes,
        phase: Phase,
        name: Name,
        placement: tuple[Sequence[int], Sequence[int]],
        steps: int = BLOCK_STEPS,
    ) -> tuple[list[Report], list[WindowResult]]:
        """One block of steps, into the table; what ranks and devices said of it, by stage."""
        layers, devices = placement
        windows = [Window([self.devices[one]]) for one in devices]
        with contextlib.ExitStack() as stack:
            for window in windows:
                stack.enter_context(window)
            ranks.send({"go": SETTLING + steps})
            reports = ranks.gather(BLOCK_S + 10 * (SETTLING + steps) * self.step_s)
        seen = [window.result for window in windows if window.result]
        rows = []
        for index in range(SETTLING, SETTLING + steps):
            seconds = max(report["times"][index] for report in reports)
            busy = [sum(report["passes"][index].values()) for report in reports]
            rows.append(
                PlacementRow(
                    case_id=self.case.case_id,
                    role="judge",
                    step=self.step,
                    block=self.block,
                    phase=phase,
                    placement=name,
                    layers=_joined(layers),
                    devices=_joined(devices),
                    step_time_s=seconds,
                    busy_s=_joined([round(one, 6) for one in busy]),
                    clock_mhz=_known([one.clock_mean_mhz for one in seen]),
                    power_w=_known([_power_w(one) for one in seen]),
                    temperature_c=_known([one.temperature_max_c for one in seen]),
                )
            )
            self.step += 1
        self.block += 1
        self.rows += rows
        self.step_s = rows[-1].step_time_s
        self.store.append("placement", rows)
        return reports, seen

    def in_turns(self, symmetric: Processes, phase: Turns, placements: dict[str, Any]) -> None:
        """Blocks of the symmetric placement and of another, first this one first, then that."""
        layers, devices = placements[phase]
        with self.processes(layers, devices) as other:
            for turn in range(self.case.blocks[phase]):
                pair: list[tuple[Processes, Name]] = [(symmetric, "symmetric"), (other, phase)]
                for ranks, name in pair if turn % 2 == 0 else reversed(pair):
                    self.run(ranks, phase, name, placements[name])


def measure(case: PlacementCase, devices: Sequence[Device], kind: str, store: Store) -> None:
    """Probe, predict, compare. Raises WorkError where a part of it fails, with the reason."""
    stages = case.training.gpus
    layers = case.training.model.layers
    even = [layers // stages] * stages
    uneven = [even[0] - 1, *even[1:-1], even[-1] + 1]
    order = list(range(stages))
    placements: dict[str, Any] = {"symmetric": (even, order), "uneven": (uneven, order)}
    with tempfile.TemporaryDirectory() as folder:
        work = _Comparison(case, devices, kind, store, folder)
        with work.processes(even, order) as symmetric:
            said = work.run(symmetric, "probe", "symmetric", placements["symmetric"], PROBE_STEPS)
            probe = probe_of(work, *said, others={"uneven": (uneven, order)})
            path = store.folder / PROBE
            write_json(path, probe.model_dump(mode="json", by_alias=True))
            prediction = predict(path, store)
            best = prediction["placements"]["optimised"]
            placements["optimised"] = (best["layers"], best["devices"])
            phases: tuple[Turns, ...] = ("uneven", "optimised")
            for phase in phases:
                try:
                    work.in_turns(symmetric, phase, placements)
                except WorkError as error:
                    store.note(f"the {phase} placement was not compared: {error}")
        # of the rows as they are stored, so that whoever judges them again finds the same
        rows = read_table(store.folder / "placement.csv", PlacementRow)
        value = {
            "schema": "placement-compared/1",
            "predicted_at": prediction["written"],
            "written": now(),
            "pays": prediction["pays"],
            "level": LEVEL,
            "gains": gains(rows, prediction["placements"]),
        }
        if "optimised" not in value["gains"]:
            raise WorkError("the optimised placement was not compared, see the manifest's notes")
        write_json(store.folder / COMPARED, value)


def probe_of(
    work: _Comparison,
    reports: Sequence[Report],
    seen: Sequence[WindowResult],
    others: dict[str, tuple[Sequence[int], Sequence[int]]],
) -> PlacementProbe:
    """What the symmetric placement's first block says of every device."""
    training = work.case.training
    microbatches = training.parallelism.microbatches
    share = training.model.layers // training.gpus
    stages = []
    for device, (report, state) in enumerate(zip(reports, seen, strict=True)):
        steps = report["passes"][SETTLING:]
        middle = {name: statistics.median(one[name] for one in steps) for name in steps[0]}
        whole = [one["layers_forward_s"] + one["layers_backward_s"] for one in steps]
        stages.append(
            {name: value / microbatches for name, value in middle.items()}
            | {
                "device": device,
                "layers": share,
                "step_cv": statistics.stdev(whole) / statistics.fmean(whole),
                "clock_mhz": state.clock_mean_mhz,
                "power_w": _power_w(state),
            }
        )
    value = {
        "schema": SCHEMA,
        "written": now(),
        "model": training.model.name,
        "microbatches": microbatches,
        "steps": len(work.rows),
        "step_time_s": statistics.median(row.step_time_s for row in work.rows),
        "stages": stages,
        "others": {
            name: {"layers": layers, "devices": devices}
            for name, (layers, devices) in others.items()
        },
    }
    return PlacementProbe.model_validate(value)


def predict(probe: Path, store: Store) -> dict[str, Any]:
    """`simulate.place`'s answer, as it wrote it down; by this system's calibration if it has one.

    Stages of the project meet in files only, so it runs as the command that it is.
    """
    target = store.folder / PREDICTION
    target.unlink(missing_ok=True)  # of a comparison that was cut short
    root = store.folder.parent.parent
    words = ["--probe", str(probe), "--json", str(target), "--results", str(root)]
    if (root / store.manifest.system / "calibration.json").exists():
        words += ["--system", store.manifest.system]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "simulate.place", *words],
            capture_output=True,
            text=True,
            timeout=PREDICT_S,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WorkError(f"simulate.place took longer than {PREDICT_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise WorkError(f"simulate.place failed: {last}")
    value = read_json(target, "a placement prediction")
    if not isinstance(value, dict):
        raise UserError(f"{target}: not a placement prediction")
    return value


def _power_w(state: WindowResult) -> float | None:
    """By the energy counter, which misses nothing between samples; else by samples."""
    if state.energy_j and state.seconds > 1.0:
        return state.energy_j / state.seconds
    return state.power_mean_w


def _joined(values: Sequence[float]) -> str:
    return ",".join(str(value) for value in values)


def _known(values: Sequence[float | None]) -> str | None:
    known = [round(value, 1) for value in values if value is not None]
    return _joined(known) if len(known) == len(values) else None
