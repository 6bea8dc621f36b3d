"""Sweeps of plans: nothing finished is lost, whoever simulates."""

import json
from pathlib import Path
from typing import Any

import pytest

from simulate.inputs import Inputs
from simulate.plans import sweep
from simulate.plans.find import fitting
from simulate.plans.sweep import Point, Workers
from spec.errors import UserError
from spec.parallelism import Parallelism
from topologies import load_fabric


def test_a_sweep_resumes_where_it_stopped(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = fitting(inputs.model, 8, 32, inputs.node, inputs.fabric, inputs.calibration).plans[:9]
    out = tmp_path / "sweep.jsonl"
    whole = {point.parallelism: point for point in sweep.sweep(inputs, plans)}
    part = sweep.sweep(inputs, plans, out)
    first = [next(part) for _ in range(4)]
    part.close()  # as Ctrl-C does
    with out.open("a") as file:
        file.write('{"parallelism": {"tp"')  # a process killed in the middle of a line

    simulated: list[Parallelism] = []
    real = sweep.simulate

    def counted(given: Inputs, some: Any) -> list[Point]:
        simulated.extend(plan.parallelism for plan in some)
        return real(given, some)

    monkeypatch.setattr(sweep, "simulate", counted)
    again = list(sweep.sweep(inputs, plans, out))
    assert {point.parallelism: point for point in again} == whole
    assert not {point.parallelism for point in first} & set(simulated)
    assert len(simulated) == 5
    assert len(out.read_text().splitlines()) == 1 + len(plans)


def test_a_file_of_another_sweep_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    plans = fitting(inputs.model, 8, 32, inputs.node, inputs.fabric, inputs.calibration).plans[:1]
    out = tmp_path / "sweep.jsonl"
    list(sweep.sweep(inputs, plans, out))
    other = Inputs(
        inputs.model,
        inputs.node,
        load_fabric("torus-2d"),
        inputs.calibration,
        inputs.calibration_path,
    )
    with pytest.raises(UserError, match="another model, node, fabric or calibration"):
        list(sweep.sweep(other, plans, out))
    for text, sentence in (
        ("hello\n", "line 1 is not of a sweep"),
        ('{"precious": 1}', "holds no sweep"),
    ):
        out.write_text(text)
        with pytest.raises(UserError, match=sentence):
            list(sweep.sweep(inputs, plans, out))
        assert out.read_text() == text
    out.write_bytes(b"\xa3\x00")
    with pytest.raises(UserError, match=r"sweep\.jsonl: cannot be read as a sweep"):
        list(sweep.sweep(inputs, plans, out))
    list(sweep.sweep(inputs, plans, tmp_path / "new.jsonl"))
    begun = (tmp_path / "new.jsonl").read_text()[:20]  # of its header
    out.write_text(begun)
    assert list(sweep.sweep(inputs, plans, out))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("step_time_s", "fast", "step_time_s is 'fast'; input should be a valid number"),
        ("step_time_s", -1, "step_time_s is -1; input should be greater than"),
        ("power_w", None, "power_w is None; input should be a valid number"),
        ("power_w", float("nan"), "power_w is nan; input should be"),
        ("peak_gib", [], r"peak_gib is \[\]; input should be a valid number"),
        ("peak_gib", True, "peak_gib is true or false; it must be a number"),
        ("parallelism", {"tp": 0}, "parallelism.tp is 0; input should be greater than 0"),
        ("guess", 1, "unknown key 'guess'"),
    ],
)
def test_a_line_of_a_sweep_that_cannot_be(
    inputs: Inputs, tmp_path: Path, name: str, value: Any, sentence: str
) -> None:
    """Nothing else reads the file, and a wrong line would be ranked with the rest."""
    plans = fitting(inputs.model, 8, 32, inputs.node, inputs.fabric, inputs.calibration).plans[:1]
    out = tmp_path / "sweep.jsonl"
    list(sweep.sweep(inputs, plans, out))
    header, line = out.read_text().splitlines()
    out.write_text(f"{header}\n{json.dumps(json.loads(line) | {name: value})}\n")
    with pytest.raises(UserError, match=rf"sweep\.jsonl: line 2: {sentence}"):
        list(sweep.sweep(inputs, plans, out))


def test_workers_give_the_same_points(inputs: Inputs) -> None:
    plans = fitting(inputs.model, 8, 32, inputs.node, inputs.fabric, inputs.calibration).plans[:40]
    here = set(sweep.sweep(inputs, plans))
    assert set(sweep.sweep(inputs, plans, workers=Workers(count=2))) == here


@pytest.mark.filterwarnings("ignore:.*tasks which were still being processed")
def test_a_dask_cluster_streams_resumes_and_gives_the_same_points(
    inputs: Inputs, tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed")
    plans = fitting(inputs.model, 8, 32, inputs.node, inputs.fabric, inputs.calibration).plans[:80]
    here = {point.parallelism: point for point in sweep.sweep(inputs, plans)}
    out = tmp_path / "sweep.jsonl"
    options = {"processes": False, "protocol": "tcp://", "dashboard_address": None}
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster:
        workers = Workers(address=cluster.scheduler_address.replace("tcp", "dask"))
        some = sweep.sweep(inputs, plans, out, workers)
        first = [next(some) for _ in range(5)]
        some.close()
        assert 6 <= len(out.read_text().splitlines()) < 81  # what had finished is there
        again = {one.parallelism: one for one in sweep.sweep(inputs, plans, out, workers)}
    assert {point.parallelism for point in first} < set(again)
    assert len(out.read_text().splitlines()) == 81
    assert set(again) == set(here)
    for p, point in again.items():
        assert point.step_time_s == pytest.approx(here[p].step_time_s, rel=1e-12)
