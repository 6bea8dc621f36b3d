"""Published series fitted on their anchors and projected: how many factors, and how far."""

from dataclasses import replace
from itertools import pairwise
from math import exp
from typing import Any

import numpy as np
import pytest

from simulate.series import judging as series
from simulate.series.attention import with_flash_attention
from simulate.series.fit import FASTEST, around, fit, project
from simulate.series.judging import Series, anchored, judged
from simulate.series.plan import plan
from simulate.series.rows import SeriesRow
from simulate.series.software import flash_attention
from simulate.series.step import Calibrations, Shifts
from spec.kernel import ATTENTION
from tests.made_up_series import row, simulated
from tests.simulated_steps import CALIBRATION


def test_a_precision_that_is_not_printed_turns_no_projection_over() -> None:
    """Both count by how far the kernels would be off: as the anchor gets slower, bf16 more."""
    slow = {"interconnect": "100Gb/s per node", "precision": ""}
    test = plan(row(row_id="b", gpus="64", global_batch="512", **slow))

    def ratio(times: float) -> tuple[float, str]:
        value = repr(float(simulated(CALIBRATION, row(precision="bf16"))) * times)
        anchor = plan(row(**slow | {"value": value}))
        by = Calibrations(CALIBRATION)
        entries = judged(anchored(Series("p", [anchor], [test]), by, []), by, None)
        return entries[0]["predicted_s"]["median"] / float(value), entries[0]["assumed"][-1]

    found = [ratio(times) for times in np.linspace(0.6, 1.1, 21).tolist()]
    assert all("the other precision counts" in sentence for _, sentence in found)
    steps = np.diff(np.log([value for value, _ in found]))
    assert np.all(steps < 0)  # more of an 8-bit step is the network's
    assert np.max(np.abs(np.diff(steps))) < 0.2 * np.max(np.abs(steps))  # no jump where they tie


def test_one_anchor_fits_one_factor() -> None:
    """Rows whose kernels all take 30 % longer than calibrated are projected exactly."""
    anchor = row(value=simulated(CALIBRATION, row(), 0.262))
    by = Calibrations(CALIBRATION)
    system = fit([plan(anchor)], by)
    assert system.moved == ("compute",)
    assert system.factors[0] == pytest.approx(0.262, abs=5e-3)
    assert np.all(system.factors[1:] == 0)
    larger = row(row_id="b", gpus="64", global_batch="512")
    projected = project(plan(larger), system, by)
    expected = float(simulated(CALIBRATION, larger, 0.262))
    assert exp(projected.value) == pytest.approx(expected, rel=0.01)
    assert projected.doublings == 3
    further = project(plan(row(gpus="4096", global_batch="32768")), system, by)
    assert further.sd > projected.sd > 0.02


@pytest.mark.parametrize("log_time", [-1.0, 0.5, 1.0])
def test_what_kernels_cannot_explain_of_an_anchor_goes_with_its_like(log_time: float) -> None:
    """However far the fit gets: no round leaves more than the one before, and no row is lost."""
    by = Calibrations(CALIBRATION)
    anchor = plan(row(value=simulated(CALIBRATION, row(), log_time)))
    left = [abs(fit([anchor], by, rounds=rounds).residuals[0]) for rounds in range(7)]
    assert all(later < before + 0.01 for before, later in pairwise(left))
    system = fit([anchor], by)
    alike = project(plan(row(row_id="b", value="1")), system, by).value
    assert alike == pytest.approx(np.log(anchor.real_s), abs=1e-9)
    changed = project(plan(row(row_id="c", micro_batch="2", value="1")), system, by)
    assert changed.sd > abs(system.residuals[0]) * 0.7


def test_no_anchor_asks_for_kernels_far_beyond_the_peak() -> None:
    """What its messages hide may take any time; what is left of the row is said instead."""
    value = float(simulated(CALIBRATION, row(tp="1", pp="1", sharding="FSDP"))) / 2
    anchor = plan(row(tp="1", pp="1", sharding="FSDP", value=repr(value)))
    system = fit([anchor], Calibrations(CALIBRATION))
    assert system.factors[0] == FASTEST
    assert system.residuals[0] > 0.2


def test_no_projection_is_beyond_the_peak() -> None:
    by = Calibrations(CALIBRATION)
    system = fit([plan(row(value=simulated(CALIBRATION, row(), -1.0)))], by)
    one = plan(row(row_id="b", tp="1", pp="1", micro_batch="4", value="9"))
    assert one.flops / exp(project(one, system, by).value) == pytest.approx(989.4e12)
    found = anchored(Series("p", list(system.anchors), [one]), by, [])
    (entry,) = judged(found, by, None)
    assert entry["predicted_s"]["low"] == pytest.approx(one.flops / 989.4e12)


def test_what_anchors_do_not_tell_of_a_row_widens_it() -> None:
    """Another share of attention, another GPU, another size: each by itself, beside a like row."""
    by = Calibrations(CALIBRATION)
    system = fit([plan(row(value=simulated(CALIBRATION, row())))], by)

    def sd(**changes: str) -> float:
        return project(plan(row(row_id="b", value="60", **changes)), system, by).sd

    alike = sd()
    assert sd(seq_len="65536") > sd(seq_len="8192") > alike
    assert sd(gpu_type="H100") > alike
    assert sd(gpu_type="H200 700W") == alike
    assert sd(gpu_type="H200 500W") > 1.2 * alike  # as much another one
    assert sd(layers="64") > sd(layers="48") > alike
    # the nearest of several anchors counts
    far = replace(system, attention=(0.9, *system.attention))
    assert project(plan(row(row_id="b", value="60")), far, by).sd == alike
    other = plan(row(row_id="h", gpu_type="H100", value="60"))
    both = replace(system, anchors=(*system.anchors, other), residuals=(*system.residuals, 0.0))
    assert project(other, both, by).sd < sd(gpu_type="H100")


@pytest.mark.parametrize(("version", "times"), [(1, (1.89, 3.31)), (2, (1.0, 1.75))])
def test_attention_of_earlier_flash_attention_is_slower(
    version: int, times: tuple[float, float]
) -> None:
    """By cited utilisations, on an A100 and on an H100; products stay."""
    for gpu, slower in zip(("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"), times, strict=True):
        early = with_flash_attention(CALIBRATION, gpu, version)
        for one, was in zip(early.kernels, CALIBRATION.kernels, strict=True):
            if was.op == "attention":
                dims = (1, 16384, 32, 8, 128)
                ratio = one.time_us(dims)[0] / was.time_us(dims)[0]
                assert ratio == pytest.approx(slower, rel=0.01)
            elif was.op not in ATTENTION:
                assert one == was
    theirs, ours = (plan(row(source=name)) for name in ("mosaicml/llm-foundry", "NVIDIA"))
    by = Calibrations(CALIBRATION)
    assert by.of(theirs) != by.of(ours)
    sources = ("mosaicml/llm-foundry", "pytorch/torchtitan", "NVIDIA/Megatron-LM")
    assert [flash_attention(row(source=source)) for source in sources] == [1, 2, 0]
    assert flash_attention(row(source="pytorch/torchtitan", gpu_type="MI300X")) == 0


def test_a_second_anchor_with_more_network_fits_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = {"network latency": 0.0, "network efficiency": 0.0}
    assert set(slow) == set(Shifts(np.zeros((1, 5)), 0.2, 0.1)._network)
    far = {"gpus": "64", "tp": "1", "pp": "1", "global_batch": "64", "sequence_parallel": ""}
    far |= {"sharding": "DDP", "interconnect": "1x 100Gb/s per node", "flags": ""}
    at = np.array([0.1, 0.3, 0.0, 0.0, 0.0])
    by = Calibrations(CALIBRATION)
    rows = [row(row_id="a"), row(row_id="b", **far)]
    timed = [
        SeriesRow(dict(one.cells) | {"value": repr(exp(around(plan(one), by, at)[0]))})
        for one in rows
    ]
    system = fit([plan(one) for one in timed], by)
    assert system.moved == ("compute", "network")
    assert system.factors[1] == pytest.approx(0.3, abs=0.05)
    # what else may be slow is tried one by one: the network that they fit is fitted anew beside it
    tried: list[tuple[Any, bool]] = []

    def counted(*words: Any, unmoved: Any = None, network: bool = True, **more: Any) -> Any:
        tried.append((unmoved, network))
        return fit(*words, unmoved=unmoved, network=network, **more)

    monkeypatch.setattr(series, "fit", counted)
    larger = plan(row(row_id="c", **far | {"gpus": "128", "global_batch": "128"}))
    judged(anchored(Series("p", [plan(one) for one in timed], [larger]), by, []), by, None)
    assert [(list(unmoved), network) for unmoved, network in tried if unmoved] == [(["host"], True)]
