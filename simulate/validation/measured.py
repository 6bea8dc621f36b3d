"""What a measured training step is simulated with: its system's calibration, node and fabric."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from simulate.inputs import (
    CPU_FABRIC,
    DEFAULT_FABRIC,
    calibration_for,
    calibration_of,
    default_node,
    measured_node,
)
from spec.calibration import Calibration, read_calibration
from spec.fitted import changed
from spec.hardware import Fabric, Node
from spec.results import ResultSet
from spec.training_records import StepRow, TrainingRow
from topologies import load_fabric


@dataclass(frozen=True)
class Setting:
    """Of one row; `devices` are hashes of its host's, in order, where they are known."""

    path: Path  # of the calibration
    calibration: Calibration
    node: Node
    fabric: Fabric
    devices: Sequence[str]


class Settings:
    """The settings of rows; files are read once, not for every row.

    `calibration` and `fabric` are those that a command was given, None where it was not.
    """

    def __init__(self, calibration: str | None = None, fabric: str | None = None) -> None:
        self._given, self._given_fabric = calibration, fabric
        self._nodes: dict[Path, Node | None] = {}
        self._read, self._fabric = cache(read_calibration), cache(load_fabric)
        self._moved = cache(self._calibration)

    def of(self, found: ResultSet, row: TrainingRow) -> Setting:
        """The setting of one row of a result set."""
        path = calibration_path(self._given, found)
        if found.path not in self._nodes:
            self._nodes[found.path] = measured_node(found)
        calibration, node = self._moved(path, row.one_queue, row.learnt, self._nodes[found.path])
        emulated = row.nodes > 1 and len(found.manifest.hosts) == 1
        name = CPU_FABRIC if emulated else fabric_of(calibration)
        fabric = self._fabric(self._given_fabric or name)
        return Setting(path, calibration, node, fabric, hashes_of(found))

    def _calibration(
        self, path: Path, one_queue: bool, learnt: bool, node: Node | None
    ) -> tuple[Calibration, Node]:
        calibration = changed(self._read(path), one_queue=one_queue)
        if not learnt:
            calibration = changed(calibration, training_sd=0.0)
        node = node or default_node(calibration)
        return calibration_for(calibration, node), node


def calibration_path(given: str | None, found: ResultSet) -> Path:
    """The calibration of a result set's system; an imported log may name the one of its GPUs."""
    folder, about = found.path.parent, found.manifest
    if about.base_system and about.emulated_nodes == 1:
        base = folder.parent / about.base_system
        if not (folder / "calibration.json").is_file() and (base / "calibration.json").is_file():
            folder = base
    return calibration_of(given, folder)


def fabric_of(calibration: Calibration) -> str:
    """Fabric between hosts: one-host runs do not use it, emulated ones run over the loopback."""
    emulated = any(
        one.protocol == "tcp" and one.source == "measured" for one in calibration.networks
    )
    return CPU_FABRIC if emulated or calibration.kind == "cpu" else DEFAULT_FABRIC


def hashes_of(found: ResultSet) -> list[str]:
    """Hashes of the devices of a run's first host, in order; none where rows may be of others."""
    if not found.manifest.on_known_devices:
        return []
    return [one.uuid_hash for one in found.manifest.hosts[0].devices]


def mean_steps_s(found: ResultSet) -> dict[str, float]:
    """Mean of the timed steps of each configuration of a run, s, by its case."""
    steps: dict[str, list[float]] = defaultdict(list)
    for one in found.table(StepRow):
        steps[one.case_id].append(one.step_time_s)
    return {case_id: fmean(times) for case_id, times in steps.items()}
