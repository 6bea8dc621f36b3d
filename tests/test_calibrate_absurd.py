"""One row that is far too short, as none can be: what is fitted does not follow it."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import TypeVar

import pytest

from calibrate.alone import highest, lowest
from calibrate.evidence import Evidence, Ledger
from calibrate.fit import fit, systems
from calibrate.kernels.shapes import kernel_groups
from calibrate.network import inside_node, own
from calibrate.network.own import Crossing, fit_networks
from calibrate.network.structure import UNTOLD_SD, fit_structure
from calibrate.physics import System, fit_physics, system_of
from spec.calibration import Calibration, Parameter
from spec.collective_fit import CollectiveCurve, CollectivePoint, CollectiveStructure
from spec.files import read_table, write_table
from spec.interval import Z90
from spec.kernel import Kernel
from spec.records import CollectiveRow, KernelRow
from tests.test_calibrate_fit import write_small
from tests.test_kernel_visits import STATE, row, run_on

Timed = TypeVar("Timed", KernelRow, CollectiveRow)

RESULTS = Path(__file__).parent.parent / "results"
LARGE = 2**26
TIMES = ("median_us", "p10_us", "p90_us", "min_us", "mean_us", "std_us")
GROWN = CollectiveStructure(
    launch_us=9.0, step_us=1.0, busbw_gbytes_per_s=360.0, copy_share=0.1, pipelining=0.3
)


def shorter(row: Timed, by: float) -> Timed:
    """The row, so many times shorter."""
    update = {name: getattr(row, name) / by for name in TIMES}
    if isinstance(row, CollectiveRow):
        update["busbw_gbytes_per_s"] = row.busbw_gbytes_per_s * by
        if row.slowest_us:
            update["slowest_us"] = row.slowest_us / by
    return row.model_copy(update=update)


def moved(before: Sequence[Parameter], after: Sequence[Parameter]) -> dict[str, float]:
    """By name, by what part of its interval a parameter moved; its width, by what factor."""
    found = {}
    now = {one.name: one for one in after}
    assert now.keys() == {one.name for one in before}
    for one in before:
        other, width = now[one.name], one.high - one.low
        if width > 0:
            found[one.name] = abs(other.value - one.value) / width
            found[f"{one.name}, width"] = abs(log((other.high - other.low) / width))
    return found


def test_a_value_that_no_other_comes_near_is_not_the_highest() -> None:
    assert highest([3.0, 2.9, 1.0]) == 3.0
    assert highest([300.0, 2.9, 3.0, 1.0]) == 3.0
    assert lowest([0.001, 7.0, 5.1, 5.0]) == 5.0
    assert lowest([5.0, 5.1, 7.0]) == 5.0
    assert (highest([300.0, 3.0]), lowest([4.0, 300.0, 900.0])) == (300.0, 4.0)  # who is wrong?


@pytest.mark.parametrize("index", [0, 8, 16])
def test_ceilings_of_operations_are_not_those_of_one_row(index: int) -> None:
    copies = [Kernel("copy", "forward", (2**power,)) for power in range(14, 31)]
    products = [Kernel("gemm", "forward", (m, 4096, 4096)) for m in (1024, 2048, 4096, 8192)]
    clean = [(one, 3.0 + one.bytes / 3.2e6) for one in copies]
    bound = [(one, 3.0 + one.flops / 600e6) for one in products]
    spoilt = [*clean[:index], (copies[index], 1e-3), *clean[index + 1 :]]
    system, other = system_of([clean, bound]), system_of([spoilt, bound])
    for name in ("launch_us", "gbytes_per_s"):
        assert getattr(other, name) == pytest.approx(getattr(system, name), rel=0.35), name
    known, _ = fit_physics(bound, system)
    found, _ = fit_physics(bound, other)
    assert found.tflops == pytest.approx(known.tflops, rel=0.01)
    assert found.gbytes_per_s == pytest.approx(known.gbytes_per_s, rel=0.35)
    mine, _ = fit_physics(spoilt, other)
    assert mine.gbytes_per_s == pytest.approx(3200, rel=0.02)
    assert mine.launch_us == pytest.approx(3.0, rel=0.02)


def test_ceilings_of_few_shapes_are_not_those_of_one_row() -> None:
    system = System(3.0, 3200.0)
    products = [Kernel("gemm", "forward", (512, 4096, 1024 * k)) for k in range(1, 7)]
    times = [3.0 + one.flops / 600e6 for one in products]
    times[0] /= 1e3
    physics, _ = fit_physics(list(zip(products, times, strict=True)), system)
    assert physics.tflops == pytest.approx(600, rel=0.1)
    copies = [Kernel("copy", "forward", (2**power,)) for power in range(22, 31, 2)]
    times = [3.0 + one.bytes / 2.5e6 for one in copies]
    times[-1] /= 100
    physics, _ = fit_physics(list(zip(copies, times, strict=True)), system)
    assert physics.gbytes_per_s == pytest.approx(2500, rel=0.06)


@pytest.mark.parametrize("count", [2, 3])
def test_all_kernels_tell_which_of_few_shapes_is_wrong(tmp_path: Path, count: int) -> None:
    copies = [row(Kernel("copy", "forward", (2**k,)), 3.0 + 2**k / 8e5) for k in range(14, 31)]
    norms = [Kernel("rmsnorm", "forward", (2**k, 4096)) for k in (8, 12, 16)]
    timed = [row(one, 4.0 + one.bytes / 2.5e6) for one in norms]
    timed[-1] = shorter(timed[-1], 100)
    rows = [*copies, *timed[-count:]]
    groups = kernel_groups(Evidence("made", [run_on(tmp_path, 1, 1, rows)]), STATE)
    group = groups["rmsnorm", "forward", "bf16"]
    assert [one.kernel for one in group.shapes] == norms[-count:-1]
    assert group.absurd == 1
    assert groups["copy", "forward", "bf16"].absurd == 0


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("absurd") / "results"
    write_small(folder, ("gemm", "attention", "copy", "rmsnorm", "swiglu", "adam"))
    return folder


def fitted(results: Path) -> Calibration:
    (one,) = systems(results)
    return fit(one)


@pytest.fixture(scope="module")
def clean(written: Path) -> Calibration:
    return fitted(written)


def spoilt(
    written: Path,
    to: Path,
    table: type[Timed],
    chosen: Callable[[Timed], bool],
    by: float,
) -> Calibration:
    """Fitted with the first of the chosen rows so many times shorter."""
    results = Path(shutil.copytree(written, to))
    name = "kernels" if table is KernelRow else "collectives"
    path = results / "synthetic" / "run-1" / f"{name}.csv"
    rows = read_table(path, table)
    at = next(number for number, row in enumerate(rows) if chosen(row))
    rows[at] = shorter(rows[at], by)
    write_table(path, table, rows)
    return fitted(results)


@pytest.mark.parametrize(
    ("op", "direction", "by"),
    [("copy", "forward", 1e5), ("rmsnorm", "backward", 1e5), ("gemm", "forward", 100.0)],
)
def test_a_kernel_that_took_no_time_moves_no_parameter(
    written: Path, clean: Calibration, tmp_path: Path, op: str, direction: str, by: float
) -> None:
    def chosen(row: KernelRow) -> bool:
        burst = row.state == "burst" and row.kernel.bytes > LARGE
        return row.op == op and row.direction == direction and burst

    found = spoilt(written, tmp_path / "results", KernelRow, chosen, by)
    off = moved(clean.parameters, found.parameters)
    assert max(off.values()) < 0.3, max(off, key=lambda name: off[name])
    (one,) = (p for p in found.parameters if p.name == f"kernel.{op}.{direction}.bf16.launch_us")
    assert one.detail.endswith("without 1 far shorter than the others say")
    before, after = ({(h.model, h.split): h for h in c.held_out} for c in (clean, found))
    for key, held in after.items():
        assert held.p90_error < 1.25 * before[key].p90_error + 0.01, key


@pytest.mark.parametrize("collective", ["all_reduce", "send_recv"])
@pytest.mark.parametrize("size", [2**10, 2**26, 2**30])
def test_a_collective_that_took_no_time_moves_no_parameter(
    written: Path, clean: Calibration, tmp_path: Path, collective: str, size: int
) -> None:
    def chosen(row: CollectiveRow) -> bool:
        return row.collective == collective and row.bytes == size

    found = spoilt(written, tmp_path / "results", CollectiveRow, chosen, 1e3)
    off = moved(clean.parameters, found.parameters)
    # of this collective a size is gone, first or last one or not
    others = {
        name: by for name, by in off.items() if not name.startswith(f"collective.{collective}")
    }
    assert max(others.values()) < 0.1, max(others, key=lambda name: others[name])
    names = ("launch_us", "step_us", "busbw_gbytes_per_s", "copy_share", "pipelining")
    own_ = {name: off[f"collective.{collective}.{name}"] for name in names}
    assert max(own_.values()) < 0.3, own_
    (fit_,) = (one for one in found.collectives if one.collective == collective)
    (known,) = (one for one in clean.collectives if one.collective == collective)
    time, _ = fit_.time_us(2, size)
    assert time == pytest.approx(known.time_us(2, size)[0], rel=0.25)


@pytest.mark.parametrize("size", [0, 10, 20])
def test_a_size_that_took_no_time_moves_no_parameter_of_a_structure(size: int) -> None:
    (curve,) = sweep(range(10, 31))
    points = list(curve.points)
    points[size] = points[size].model_copy(update={"time_us": points[size].time_us / 1e4})
    known, sds = fit_structure("all_reduce", [curve])
    found, _ = fit_structure("all_reduce", [curve.model_copy(update={"points": tuple(points)})])
    for name, value in found.model_dump().items():
        assert abs(log(value / getattr(known, name))) < Z90 * sds[name], name


@pytest.mark.parametrize("system", ["2x-h100-2x1", "4x-h200-4x1", "netns-200mbit-cold"])
@pytest.mark.parametrize(("at", "role"), [(0, "fit"), (-1, "fit"), (-1, "judge")])
def test_a_message_between_nodes_that_took_no_time_moves_no_parameter(
    monkeypatch: pytest.MonkeyPatch, system: str, at: int, role: str
) -> None:
    (evidence,) = systems(RESULTS, system)
    before = network_parameters(evidence)

    def with_one(some: Evidence, role_of: str = "fit") -> dict[str, list[Crossing]]:
        found = crossings(some, role_of)
        if role_of == role:
            rows = sorted(found["tcp"], key=lambda one: (one.row.bytes, one.row.case_id))
            rows[at] = replace(rows[at], row=shorter(rows[at].row, 1e6))
            found["tcp"] = rows
        return found

    crossings = own.crossings
    monkeypatch.setattr(own, "crossings", with_one)
    off = moved(before, network_parameters(evidence))
    assert max(off.values()) < 0.3, off


def network_parameters(evidence: Evidence) -> list[Parameter]:
    ledger = Ledger()
    fit_networks(evidence, ledger)
    return [one for one in ledger.parameters if one.name.startswith("network.tcp")]


def sweep(powers: Sequence[int]) -> list[CollectiveCurve]:
    points = (
        CollectivePoint(bytes=2**k, time_us=GROWN.time_us("all_reduce", 2, 2.0**k), sd=0.02)
        for k in powers
    )
    return [CollectiveCurve(ranks=2, points=tuple(points))]


def test_short_messages_leave_the_links_rate_open() -> None:
    name = "busbw_gbytes_per_s"
    for largest in (13, 16, 18, 20):
        found, sds = fit_structure("all_reduce", sweep(range(10, largest + 1)))
        off = log(GROWN.busbw_gbytes_per_s / found.busbw_gbytes_per_s)
        assert abs(off) < 1.1 * Z90 * sds[name]
        assert sds[name] > 0.5
        # what other collectives reached is a better guess, and as open as a guess
        found, sds = fit_structure("all_reduce", sweep(range(10, largest + 1)), 360.0)
        assert abs(log(GROWN.busbw_gbytes_per_s / found.busbw_gbytes_per_s)) < Z90 * sds[name]
    found, sds = fit_structure("all_reduce", sweep(range(10, 31)))
    assert found.busbw_gbytes_per_s == pytest.approx(360, rel=0.05)
    assert sds[name] < 0.15 < UNTOLD_SD


@pytest.mark.parametrize(("cut", "source"), [("all_gather", "assumed"), (None, "measured")])
def test_the_rate_of_a_collective_timed_in_short_messages_is_assumed(
    monkeypatch: pytest.MonkeyPatch, cut: str | None, source: str
) -> None:
    def some(evidence: Evidence, role: str = "fit") -> list[CollectiveRow]:
        return [row for row in rows(evidence, role) if row.collective != cut or row.bytes <= 2**18]

    rows = inside_node.inside_node
    monkeypatch.setattr(inside_node, "inside_node", some)
    for system in ("2x-h100", "8x-h200"):
        (evidence,) = systems(RESULTS, system)
        ledger = Ledger()
        inside_node.fit_collectives(evidence, ledger)
        rates = {one.name: one for one in ledger.parameters if "busbw_gbytes" in one.name}
        told = rates.pop("collective.all_gather.busbw_gbytes_per_s")
        assert told.source == source
        assert (told.high > 3 * told.low) == (source == "assumed")
        assert {one.source for one in rates.values()} == {"measured"}


def test_the_rate_of_nodes_that_sent_short_messages_is_assumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (evidence,) = systems(RESULTS, "4x-h200-4x1")
    (whole,) = (one for one in fit_networks(evidence, Ledger()) if one.protocol == "tcp")

    def some(of: Evidence, role: str = "fit") -> dict[str, list[Crossing]]:
        found = crossings(of, role)
        return {
            name: [one for one in rows if one.row.bytes <= 2**16] for name, rows in found.items()
        }

    crossings = own.crossings
    monkeypatch.setattr(own, "crossings", some)
    ledger = Ledger()
    (fit_,) = (one for one in fit_networks(evidence, ledger) if one.protocol == "tcp")
    (rate,) = (one for one in ledger.parameters if one.name == "network.tcp.node_gbytes_per_s")
    assert rate.source == "assumed"
    assert rate.low < (whole.node_gbytes_per_s or 0.0) < rate.high
    path = own.path_of(2, 2, 1.0)
    for kind in ("all_reduce", "send_recv"):
        long = float(2**28)
        off = log(fit_.time_us(kind, path, long, 1e6) / whole.time_us(kind, path, long, 1e6))
        assert abs(off) < Z90 * fit_.sd(kind, path, long, 1e6)
