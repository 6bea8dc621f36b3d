"""What goes with a row of a published series from the others: what is left, a batch, chunks."""

from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from simulate.series.fit import fit, project
from simulate.series.judging import Series, anchored, judged, others_kernels
from simulate.series.plan import plan
from simulate.series.search import own_choices, shared_choices
from simulate.series.step import Calibrations
from simulate.series.validation import series_validation
from spec.calibration import Calibration
from tests.made_up import write_calibration
from tests.made_up_series import WHOLE, row, simulated, write


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    return write_calibration(tmp_path / "calibration.json")


def test_what_is_left_of_the_nearest_anchor_goes_with_a_row(calibration: Calibration) -> None:
    """Replicas more of an anchor that no factor explains are as slow, not as the mean of all."""
    by = Calibrations(calibration)

    def at(name: str, gpus: int, slower: float) -> dict[str, str]:
        cells = {"row_id": name, "gpus": str(gpus), "global_batch": str(8 * gpus)}
        return cells | {"value": simulated(calibration, row(**cells), slower)}

    anchors = [plan(row(**at(*one))) for one in (("a", 8, 0.0), ("b", 16, 0.0), ("c", 32, 0.3))]
    system = fit(anchors, by)
    left = dict(zip("abc", system.residuals, strict=True))
    assert left["c"] < -0.05 < 0 < left["a"]
    assert system.noise > 0.08
    larger = plan(row(row_id="d", gpus="64", global_batch="512"))
    assert system.left(larger) == pytest.approx(left["c"], rel=0.1)
    # as one run differs from the next by 2 %, so much of a small rest is no row's own
    quiet = replace(system, noise=0.02)
    assert quiet.left(larger) == 0
    # weak scaling from the slow anchor is no faster than that
    slow = project(larger, system, by).value
    assert slow == pytest.approx(log(anchors[2].real_s), abs=0.05)


def test_a_batch_that_is_not_printed_is_another_rows(
    calibration: Calibration, tmp_path: Path
) -> None:
    """Of the row of the series nearest in GPUs; a file's own column of that name counts nothing."""
    rows = [
        WHOLE | {"row_id": "a", "gpus": "8", "global_batch": "64"},
        WHOLE | {"row_id": "b", "gpus": "64", "global_batch": "512"},
        WHOLE | {"row_id": "c", "gpus": "32", "global_batch": "", "series_batch": "7"},
        WHOLE | {"row_id": "d", "gpus": "32", "global_batch": "", "pair_id": "alone"},
        WHOLE
        | {"row_id": "e", "gpus": "64", "global_batch": "512", "pair_id": "alone"}
        | {"seq_len": "4096"},
    ]
    value = series_validation(write(tmp_path / "s.csv", rows), calibration)
    cases = {case["id"]: case for case in value["cases"]}
    assert cases["c"]["parallelism"]["global_batch"] == 512
    assert "global batch 512 as in another row of its series" in cases["c"]["assumed"]
    (skipped,) = (one for one in value["skipped"] if one["id"] == "d")
    assert "no pipeline's bubble" in skipped["reason"]


def test_rows_of_a_model_have_one_number_of_chunks(calibration: Calibration) -> None:
    """Most rows' own, also where memory would refuse it."""
    by = Calibrations(calibration)
    open_vpp = {"vpp": "", "pp": "4", "tp": "1", "layers": "16"}
    plans = [
        plan(row(row_id=f"r{gpus}", gpus=str(gpus), global_batch=str(4 * gpus), **open_vpp))
        for gpus in (8, 16, 32)
    ]
    plans.append(plan(row(row_id="few", gpus="256", global_batch="256", **open_vpp)))
    shared = shared_choices(plans[:1], plans[1:], by)
    found = own_choices(plans, shared, by)
    assert len({choices.get("vpp") for choices in found.values()}) == 1


def test_a_slow_network_may_be_what_makes_kernels_slow(calibration: Calibration) -> None:
    """Where two other series of a source have faster kernels, the rows' intervals hold it."""
    by = Calibrations(calibration)
    sharded = {"tp": "1", "pp": "1", "sharding": "FSDP", "flags": "", "micro_batch": "4"}
    sharded |= {"seq_len": "8192", "interconnect": "2x 200Gb/s per node"}

    def series(name: str, slower: float, **cells: str) -> Series:
        value = simulated(calibration, row(gpus="16", global_batch="64", **cells), slower)
        anchor = plan(row(row_id=name, gpus="16", global_batch="64", value=value, **cells))
        test = plan(row(row_id=f"{name}-test", gpus="32", global_batch="64", **cells))
        return Series(name, [anchor], [test])

    every = [
        anchored(one, by, [])
        for one in (
            series("sharded", 0.4, **sharded),
            series("one", 0.0),
            series("two", 0.0, layers="16"),
        )
    ]
    kernels = others_kernels(every[0], every)
    assert kernels == pytest.approx(0, abs=0.05)
    assert others_kernels(every[0], every[:2]) is None  # one other says little

    def width(known: float | None) -> float:
        (entry,) = judged(every[0], by, known)
        return log(entry["predicted_s"]["high"] / entry["predicted_s"]["low"])

    assert width(kernels) > 1.5 * width(None)
    assert judged(every[1], by, others_kernels(every[1], every)) == judged(every[1], by, None)
