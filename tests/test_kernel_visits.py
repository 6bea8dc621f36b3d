"""How far a measured shape lies on another visit: learned from shapes that several visits timed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from calibrate.clock.kernel_visits import fit_shape_spread
from calibrate.evidence import Evidence, Ledger
from calibrate.kernels.shapes import kernel_groups
from calibrate.state import SHAPE_VISIT_SD, ClockState, ShapeSpread
from calibrate.variability import visit_sd
from spec.interval import Z90
from spec.kernel import Kernel
from spec.records import KernelRow
from spec.results import ResultSet
from tests.synthetic import kernel_rows, manifest
from tests.test_calibrate_fit import TRUTH

STATE = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.0, False: 0.0})
SHAPES = [Kernel("copy", "forward", (size << 20,)) for size in range(1, 81)]
KEY = ("copy", "forward", "bf16")


@cache
def a_copy() -> KernelRow:
    return next(one for one in kernel_rows(TRUTH, 4, np.random.default_rng(0)) if one.op == "copy")


def row(kernel: Kernel, time_us: float, noise: float = 0.0) -> KernelRow:
    """A burst of a kernel whose repeats spread by `noise` (sd, log)."""
    quantile = exp(1.2816 * noise)
    return a_copy().model_copy(
        update={
            "op": kernel.op,
            "direction": kernel.direction,
            "shape": kernel.shape,
            "state": "burst",
            "repeats": 100,
            "clock_mhz": None,
            "host_us": None,
            "median_us": time_us,
            "p10_us": time_us / quantile,
            "p90_us": time_us * quantile,
        }
    )


def evidence(visits: Sequence[Sequence[KernelRow]]) -> Evidence:
    """One run for each visit, all on other devices."""

    def run(index: int, rows: Sequence[KernelRow]) -> Any:
        about = SimpleNamespace(run=f"run-{index}", device_hashes=(f"device-{index}",))
        return SimpleNamespace(
            manifest=about, table=lambda wanted: rows if wanted is KernelRow else []
        )

    return Evidence("made-up", cast(Any, [run(*one) for one in enumerate(visits)]))


def visit(sd: float, seed: int, noise: float = 0.0, shapes: Sequence[Kernel] = SHAPES) -> Any:
    """All shapes as one visit times them, apart by `sd` from 100 us."""
    off = np.random.default_rng(seed).normal(0.0, sd, len(shapes))
    return [row(one, 100.0 * exp(by), noise) for one, by in zip(shapes, off, strict=True)]


def fitted(visits: Sequence[Sequence[KernelRow]]) -> ShapeSpread:
    return fit_shape_spread(evidence(visits), STATE, Ledger())


def test_another_visit_lies_within_what_earlier_ones_say() -> None:
    for sd in (0.005, 0.03):
        spread = fitted([visit(sd, seed) for seed in range(12)])
        assert spread.between[KEY] == pytest.approx(sd, rel=0.25)
        later = [one.median_us for one in visit(sd, 99)]
        limits = [Z90 * spread.sd(one) for one in SHAPES]
        inside = np.abs(np.log(np.array(later) / 100.0)) <= limits
        assert 0.8 <= inside.mean() <= 0.98


def test_what_repeats_leave_open_is_a_shapes_own() -> None:
    quiet, loud = SHAPES[::2], SHAPES[1::2]
    noise = 0.1  # a median of 100 in one state counts as ten: 1.25 * 0.1 / sqrt(10)
    visits = [visit(0.004, seed, 0.0, quiet) for seed in range(12)]
    for seed, mine in enumerate(visits):
        mine += visit(1.25 * noise / 10**0.5, 100 + seed, noise, loud)
    spread = fitted(visits)
    assert spread.sd(quiet[0]) < 0.015
    assert spread.sd(loud[0]) == pytest.approx(1.25 * noise / 10**0.5, rel=0.1)
    new = Kernel("copy", "forward", (7,))  # not measured: as an operation's shapes usually are
    assert spread.sd(quiet[0]) <= spread.sd(new) <= spread.sd(loud[0])


def test_few_timings_lean_on_all_operations_and_one_visit_on_what_is_assumed() -> None:
    rare = [Kernel("rope", "forward", (1024, 8, 128))]
    visits = [visit(0.005, seed) + visit(0.1, seed, shapes=rare) for seed in range(8)]
    spread = fitted(visits)
    assert spread.between[KEY] < spread.between["rope", "forward", "bf16"] < 0.09
    ledger = Ledger()
    once = fit_shape_spread(evidence([visit(0.005, 0)]), STATE, ledger)
    assert once.between == {}
    assert 1.2 * SHAPE_VISIT_SD < once.other < 2 * SHAPE_VISIT_SD  # Student's, of few visits
    assert [(one.name, one.source) for one in ledger.parameters] == [("kernel.visit_sd", "assumed")]


def test_the_same_devices_again_are_no_other_visit() -> None:
    runs = evidence([visit(0.03, 0), visit(0.03, 1)])
    for one in runs.runs:
        one.manifest.device_hashes = ("same",)
    assert fit_shape_spread(runs, STATE, Ledger()).between == {}


def run_on(path: Path, number: int, device: int, rows: Sequence[KernelRow]) -> ResultSet:
    """A run of one device."""
    about = manifest("made-up", f"run-{number}", 1, TRUTH, "2030-01-01T00:00:00Z")
    (host,) = about.hosts
    (only,) = host.devices
    own = only.model_copy(update={"uuid_hash": f"{device:016x}"})
    hosts = (host.model_copy(update={"devices": (own,)}),)
    return ResultSet(path, about.model_copy(update={"hosts": hosts}), {"kernels": list(rows)})


def test_a_visit_counts_once_however_many_rows_it_has(tmp_path: Path) -> None:
    kernel, state = SHAPES[40], replace(STATE, shape_spread=ShapeSpread(other=0.02))

    def run(number: int, device: int, time_us: float) -> ResultSet:
        return run_on(tmp_path, number, device, [row(kernel, time_us)])

    def found(runs: Sequence[ResultSet]) -> tuple[float, float]:
        ((one,),) = [each.shapes for each in kernel_groups(Evidence("made", runs), state).values()]
        return one.time_us, one.sd

    first = [run(number, 1, 100.0) for number in range(4)]
    time_us, sd = found([*first, run(4, 2, 104.0)])
    assert time_us == pytest.approx((100.0 * 104.0) ** 0.5)
    assert sd == pytest.approx(0.02 / 2**0.5, rel=0.05)
    assert found(first) == found(first[:1])
    assert found([run(number, number, 100.0) for number in range(4)])[1] < sd


def test_runs_of_a_visit_do_not_make_the_machine_look_steady(tmp_path: Path) -> None:
    def found(runs: Sequence[tuple[int, float, Sequence[Kernel]]]) -> tuple[float, str]:
        ledger = Ledger()
        sets = [
            run_on(tmp_path, number, device, [row(one, 100.0 * exp(off)) for one in shapes])
            for number, (device, off, shapes) in enumerate(runs)
        ]
        value = visit_sd(Evidence("made-up", sets), STATE, ledger)
        return value, ledger.parameters[0].source

    apart = [(1, 0.0, SHAPES), (2, 0.1, SHAPES)]
    once, source = found(apart)
    assert source == "assumed"
    again, source = found(apart * 3)
    assert again == pytest.approx(once)
    assert source == "assumed"  # six runs on two hosts are two visits
    # two that timed nothing alike are as far apart as the one between them says
    linked = [(1, 0.0, SHAPES[:40]), (2, 0.1, SHAPES[20:60]), (3, 0.2, SHAPES[40:])]
    assert found(linked)[0] == pytest.approx(((2 * 0.1**2 + 4 * 0.02**2) / 6) ** 0.5, rel=0.02)
    # of four in two pairs that nothing joins two are free, beside the four that are assumed
    pairs = [(1, 0.0, SHAPES[:40]), (2, 0.1, SHAPES[:40])]
    pairs += [(3, 0.0, SHAPES[40:]), (4, 0.1, SHAPES[40:])]
    value, source = found(pairs)
    assert value == pytest.approx(((4 * 0.05**2 + 4 * 0.02**2) / 6) ** 0.5, rel=0.02)
    assert source == "assumed"


def test_visits_that_timed_nothing_alike_count_for_no_spread_of_shapes() -> None:
    once = fitted([visit(0.005, 0)])
    unlike = [visit(0.005, seed, shapes=SHAPES[20 * seed : 20 * seed + 20]) for seed in range(4)]
    assert fitted(unlike).other == once.other
