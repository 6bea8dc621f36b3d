"""What goes with a row of a published series from the others: what is left, a batch, chunks."""

from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from simulate.series.fit import SEARCHED_SD, fit, project
from simulate.series.judging import Series, anchored, bounded, judged, others_kernels
from simulate.series.plan import plan
from simulate.series.search import alike_chunks
from simulate.series.step import Calibrations
from simulate.series.validation import series_validation
from tests.made_up_series import WHOLE, row, simulated, write
from tests.simulated_steps import CALIBRATION


def test_what_is_left_of_the_nearest_anchor_goes_with_a_row() -> None:
    """Replicas more of an anchor that no factor explains are as slow, not as the mean of all."""
    by = Calibrations(CALIBRATION)

    def at(name: str, gpus: int, slower: float) -> dict[str, str]:
        cells = {"row_id": name, "gpus": str(gpus), "global_batch": str(8 * gpus)}
        return cells | {"value": simulated(CALIBRATION, row(**cells), slower)}

    anchors = [plan(row(**at(*one))) for one in (("a", 8, 0.0), ("b", 16, 0.0), ("c", 32, 0.3))]
    system = fit(anchors, by)
    left = dict(zip("abc", system.residuals, strict=True))
    assert left["c"] < -0.05 < 0 < left["a"]
    assert system.noise > 0.08
    larger = plan(row(row_id="d", gpus="64", global_batch="512"))
    share = 1 - (0.02 / system.noise) ** 2
    near = {"c": 1 / 4, "b": 1 / 16, "a": 1 / 64}  # one, two and three doublings away
    mean = sum(near[name] * left[name] for name in near) / sum(near.values())
    assert system.left(larger) == pytest.approx(share * mean)
    assert mean < left["c"] / 2 < 0
    # of a row that differs from all in one way half of it
    wider = plan(row(row_id="e", gpus="64", global_batch="512", tp="4"))
    assert system.left(wider) == pytest.approx(share * mean / 2)
    # as one run differs from the next by 2 %, so much of a small rest is no row's own
    assert replace(system, noise=0.02).left(larger) == 0
    # weak scaling from the slow anchor is slower than the mean of all
    assert project(larger, system, by).value > log(anchors[0].real_s) + 0.15


def test_an_odd_anchor_counts_as_it_does_in_the_fit() -> None:
    """Five alike and one that is slow by half: a larger row is near the five."""
    by = Calibrations(CALIBRATION)
    anchors = []
    for name, gpus, slower in [*(("a", 8, 0.0),) * 3, *(("b", 16, 0.0),) * 2, ("c", 32, 0.5)]:
        cells = {"row_id": name, "gpus": str(gpus), "global_batch": str(8 * gpus)}
        value = simulated(CALIBRATION, row(**cells), slower)
        anchors.append(plan(row(**cells, value=value)))
    system = fit(anchors, by)
    larger = plan(row(row_id="d", gpus="64", global_batch="512"))
    value = project(larger, system, by).value
    assert log(anchors[0].real_s) <= value < log(anchors[0].real_s) + 0.25


def test_a_batch_that_is_not_printed_is_other_rows(tmp_path: Path) -> None:
    """Of its series, as long; a file's own column of that name counts nothing."""
    bare = WHOLE | {"global_batch": "", "gpus": "32"}
    rows = [
        # as many for each GPU
        WHOLE | {"row_id": "a", "gpus": "8", "global_batch": "64"},
        WHOLE | {"row_id": "b", "gpus": "64", "global_batch": "512"},
        bare | {"row_id": "c", "series_batch": "7"},
        # else of the nearest, of two as near the smaller; of two on as many GPUs the smaller
        WHOLE | {"pair_id": "q", "row_id": "d", "gpus": "64", "global_batch": "512"},
        WHOLE | {"pair_id": "q", "row_id": "e", "gpus": "16", "global_batch": "128"},
        WHOLE | {"pair_id": "q", "row_id": "f", "gpus": "16", "global_batch": "64"},
        bare | {"pair_id": "q", "row_id": "g"},
        # neither of longer sequences, nor where a cell is printed and not understood
        WHOLE | {"pair_id": "r", "row_id": "h", "gpus": "64", "global_batch": "512"},
        bare | {"pair_id": "r", "row_id": "i", "seq_len": "4096"},
        bare | {"pair_id": "r", "row_id": "j", "global_batch": "64 per gpu"},
        # in tokens as in sequences
        WHOLE | {"pair_id": "s", "row_id": "k", "gpus": "16", "global_batch": "1048576"},
        bare | {"pair_id": "s", "row_id": "l"},
    ]
    for _ in range(2):
        value = series_validation(write(tmp_path / "s.csv", rows), CALIBRATION)
        cases = {case["id"]: case for case in value["cases"]}
        batches = {name: cases[name]["parallelism"]["global_batch"] for name in "cgl"}
        assert batches == {"c": 256, "g": 64, "l": 512}
        assert "global batch 256 as in other rows of its series" in cases["c"]["assumed"]
        skipped = {one["id"]: one["reason"] for one in value["skipped"]}
        assert all("no pipeline's bubble" in skipped[name] for name in "ij")
        rows = rows[::-1]  # the file's order decides nothing
    interval = cases["c"]["predicted_s"]
    assert interval["high"] / interval["low"] > 1.2  # a guess, which widens it


def test_a_batch_that_nothing_prints_may_grow_with_the_gpus() -> None:
    """Or not: the median is between what both mean, which differ by a lot at scale."""
    by = Calibrations(CALIBRATION)
    blank = dict.fromkeys(("global_batch", "micro_batch", "grad_accum"), "")
    cells = blank | {"tp": "1", "pp": "1", "metric": "tokens/s/GPU", "value": "9000"}
    plans = [plan(row(**cells, row_id=gpus, gpus=gpus)) for gpus in ("8", "4096")]
    fitted = anchored(Series("p", plans[:1], plans[1:]), by, [])
    (entry,) = judged(fitted, by, None)
    of_step, of_gpu = (
        project(test, fit([anchor], by), by).value - log(test.unit_s)
        for anchor, test in (
            [plan(one.row, {**fitted.chosen[one.row.row_id], "batch": name}) for one in plans]
            for name in ("of the step", "of a GPU")
        )
    )
    assert of_step > of_gpu + 0.1
    value = log(entry["predicted_s"]["median"] / plans[1].unit_s)
    assert value == pytest.approx((of_step + of_gpu) / 2, abs=0.02)
    assert "the other batch counts 50%" in entry["assumed"]


def test_rows_of_a_model_have_one_number_of_chunks() -> None:
    """What one prints, else most anchors' own, else most rows'; one without a choice is silent."""
    cells = {"pp": "4", "tp": "1", "layers": "16", "vpp": ""}

    def chunks(chosen: dict[str, int], anchors: str = "", **printed: str) -> dict[str, int]:
        plans = [
            plan(row(row_id=name, **cells | {"vpp": printed.get(name, "")}), {"vpp": vpp})
            for name, vpp in chosen.items()
        ]
        plans.append(plan(row(row_id="few", gpus="256", global_batch="128", **cells)))
        own = {one.row.row_id: {"vpp": one.parallelism.vpp} for one in plans}
        fixed = [one for one in plans if one.row.row_id in anchors]
        found = alike_chunks(fixed, [one for one in plans if one not in fixed], own)
        return {name: choices["vpp"] for name, choices in found.items()}

    assert chunks({"a": 2, "b": 4, "c": 4}) == {"a": 4, "b": 4, "c": 4, "few": 4}
    assert chunks({"a": 2, "b": 4, "c": 4}, "a") == {"a": 2, "b": 2, "c": 2, "few": 2}
    assert chunks({"a": 2, "b": 4, "c": 4}, a="2") == {"a": 2, "b": 2, "c": 2, "few": 2}


@pytest.mark.parametrize(
    ("name", "source", "effect", "expected"),
    [
        ("microbatch", "someone/something", 0.7, 2 * SEARCHED_SD),
        ("microbatch", "bigscience-workshop/bigscience", -0.7, -2 * SEARCHED_SD),
        ("microbatch", "someone/something", 0.05, 0.05),
        ("vpp", "someone/something", 0.7, 2 * SEARCHED_SD),
        ("vpp", "bigscience-workshop/bigscience", 0.7, 0.7),  # of 2021: chunks are not searched
        ("precision", "someone/something", 0.7, 0.7),
    ],
)
def test_a_searched_choice_moves_a_row_no_further_than_a_search_is_off(
    name: str, source: str, effect: float, expected: float
) -> None:
    one = plan(row(row_id="a", gpus="8", global_batch="64", source=source))
    assert bounded(effect, name, one) == pytest.approx(expected)


def test_heads_that_are_guessed_are_divided_by_tensor_parallelism() -> None:
    """13,824 values make 108 heads of 128, which eight GPUs do not divide, or 144 of 96."""
    cells = {"model": "some 200B", "heads": "", "kv_heads": "", "hidden": "13824", "ffn_hidden": ""}
    for tp, heads in (("1", 108), ("4", 108), ("8", 144)):
        assert plan(row(**cells, tp=tp, pp="1", gpus="64")).model.heads == heads


def test_a_slow_network_may_be_what_makes_kernels_slow() -> None:
    """Where two other series of a source have faster kernels, the rows' intervals hold it."""
    by = Calibrations(CALIBRATION)
    sharded = {"tp": "1", "pp": "1", "sharding": "FSDP", "flags": "", "micro_batch": "4"}
    sharded |= {"seq_len": "8192", "interconnect": "2x 200Gb/s per node"}

    def series(name: str, slower: float, **cells: str) -> Series:
        value = simulated(CALIBRATION, row(gpus="16", global_batch="64", **cells), slower)
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
    borrowed = replace(every[2], series=replace(every[2].series, borrowed=True))
    assert others_kernels(every[0], [*every[:2], borrowed]) is None  # the same anchor again
    anchors = (plan(row(row_id="x", source="another")),)
    elsewhere = replace(every[2], system=replace(every[2].system, anchors=anchors))
    assert others_kernels(every[0], [*every[:2], elsewhere]) is None

    def width(known: float | None) -> float:
        (entry,) = judged(every[0], by, known)
        return log(entry["predicted_s"]["high"] / entry["predicted_s"]["low"])

    assert width(kernels) > 1.5 * width(None)
    assert judged(every[1], by, others_kernels(every[1], every)) == judged(every[1], by, None)
