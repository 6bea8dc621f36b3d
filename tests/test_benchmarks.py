"""What the benchmark prints of machines and missed figures."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ahead, waiting
from benchmarks.alike import mean_cosine
from benchmarks.beyond import Outside, ends, inside
from benchmarks.learning import numbered, phases
from benchmarks.reference import WORKLOADS, compared, reference
from benchmarks.simulate import last_of, replaced, table
from benchmarks.true_clock import mean_mhz
from calibrate.kernels.shapes import Group, Shape
from calibrate.physics import system_of
from measure.training.plan import TrainingCase
from measure.training.steps import StepTimes
from spec.command import run
from spec.errors import UserError
from spec.files import read_table
from spec.kernel import Kernel
from spec.training_records import TrainingConfig
from tests.commands import RESULTS

NOW = {"python_ms": 60.0, "numpy_ms": 50.0}


def measured(point_ms: float, **machine: Any) -> dict[str, Any]:
    about = {"cpu": "a CPU", "cores": 2, "load_before": 0.1, "python": "3", "numpy": "2"}
    return {"machine": about | machine, "figures": {"point_ms": point_ms}}


def test_the_reference_times_each_workload() -> None:
    found = reference(repeats=1)
    assert found.keys() == WORKLOADS.keys()
    assert all(time > 0 for time in found.values())


def test_machines_are_compared_by_the_same_work() -> None:
    text = compared(NOW, {"python_ms": 20.0, "numpy_ms": 25.0})
    assert "3.00 times as long for the same Python" in text
    assert "2.00 times as long for the same numpy calls" in text


def test_committed_figures_without_a_reference_are_said() -> None:
    text = table(measured(4.6, reference=NOW), measured(2.17))
    assert "the committed figures have none" in text
    assert "2.17" in text


def test_what_this_machine_misses_is_marked() -> None:
    slow, fast = (table(measured(ms, reference=NOW), None) for ms in (4.6, 1.9))
    assert "missed on this machine" in slow
    assert "missed" not in fast


def test_each_processor_keeps_its_figures() -> None:
    first, second = measured(2.0, cpu="A"), measured(3.0, cpu="B")
    assert last_of("B", [first, second]) is second
    assert last_of("C", [first, second]) is first
    assert last_of("A", []) is None
    again = {"machine": {"cpu": "A"}, "figures": {"cold_s": 1.0}}
    assert replaced(again, [first, second]) == [
        second,
        {"machine": {"cpu": "A"}, "figures": {"point_ms": 2.0, "cold_s": 1.0}},
    ]


def test_a_mean_clock_is_cycles_over_time_on_one_multiprocessor() -> None:
    stamps = [(7, 1_000, 500), (7, 3_000, 3_500), (7, 4_000, 5_500), (9, 9_000, 1), (9, 9_500, 801)]
    assert mean_mhz(stamps, [(0, 1)]) == 1500.0  # 3,000 cycles in 2 us
    assert mean_mhz(stamps, [(0, 1), (1, 2)]) == pytest.approx(1e3 * 5_000 / 3_000)
    assert mean_mhz(stamps, [(2, 3), (3, 4)]) == 1600.0  # counters of two do not compare
    assert mean_mhz(stamps, [(2, 3)]) is None


def test_a_mean_cosine_is_of_different_tokens() -> None:
    torch = pytest.importorskip("torch")
    alike = torch.tensor([[1.0, 2.0], [2.0, 4.0], [0.5, 1.0]])
    apart = torch.tensor([[[1.0, 0.0], [0.0, 3.0]]])
    assert mean_cosine(alike) == pytest.approx(1)
    assert mean_cosine(apart) == pytest.approx(0)
    assert mean_cosine(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) == pytest.approx(-1)


def test_text_is_numbered_by_how_common_its_tokens_are(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.py").write_text("x = x + x\n")
    (tmp_path / "deep" / "b.py").write_text("y")
    # tokens: x, a blank, =, +, a line's end, y; the two most common have numbers of their own
    assert numbered(tmp_path, 3, 100) == [1, 0, 2, 0, 1, 0, 2, 0, 1, 2, 2]
    assert numbered(tmp_path, 3, 4) == [1, 0, 2, 0]
    with pytest.raises(UserError, match="holds no Python files"):
        numbered(tmp_path / "none", 3, 100)


def test_a_model_begins_anew_before_it_learns_from_text() -> None:
    learning = [one.learning for one in phases(4)]
    first, second = (n for n, one in enumerate(learning) if one)
    assert [one.tokens for one in phases(4) if one.learning] == ["random", "text"]
    assert any(one.restored for one in phases(4)[first:second])
    assert any(one.restored for one in phases(4)[second:])


def test_shapes_beyond_the_others_are_judged_with_and_without_growth() -> None:
    found = [Outside(2.0, error, 0.1, 0.05) for error in (0.0, 0.1, -0.15, 0.3)]
    assert inside(found) == (0.75, 0.25)  # 1.645 sds: 0.16 and 0.08
    shapes = tuple(
        Shape(Kernel("copy", "forward", (2**n,)), 3.0 + 2**n * 4 / 3e6, 0.01, 1)
        for n in range(10, 30)
    )
    group = Group(("copy", "forward", "bf16"), shapes, (), ())
    out = list(ends(group, system_of([group.timings])))
    assert {round(one.factor) for one in out} == {2**n for n in range(1, 6)}
    assert all(one.sd > one.sd_without for one in out)
    assert max(abs(one.error) for one in out) < 0.1


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_kind_is_timed_beside_its_nil_steps(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each length once a turn, none of a kind twice in a row; steps of as many GPUs as asked."""
    seen: list[tuple[str, int]] = []

    def fake(case: TrainingCase, batches: tuple[int, ...], rounds: int, **_: Any) -> Any:
        assert (case.gpus, batches, rounds) == (gpus, (case.parallelism.global_batch,), 1)
        seen.append((case.case_id, case.model.seq_len))
        passes = {"layers_forward_s": 0.1, "layers_backward_s": 0.2}
        return [StepTimes([0.5, 0.4, 0.6], [passes, passes], [])]

    monkeypatch.setattr("measure.training.steps.step_times", fake)
    rows = list(waiting.measured(gpus))
    assert all(row.step_time_s == 0.5 and row.layers_s == pytest.approx(0.3) for row in rows)
    kinds = [kind for kind in waiting.KINDS if kind.gpus == gpus]
    each = [(kind.name, length) for kind in kinds for length in (0, *kind.lengths)]
    assert sorted((row.kind, row.seq_len) for row in rows) == sorted(each * waiting.TURNS)
    assert len(set(seen[:4])) == 4


def test_steps_that_wait_for_their_device_are_told_at_any_length() -> None:
    """As measured on two H200: nine lengths at which it takes 1.4 times as long as the host.

    Within 1 % until kernels were timed in a queue by a timeline, within 1.4 since (adapters' narrow
    products most; docs/visits.md, the forty-first visit), and 1.41 since those of the fifty-sixth.
    """
    rows = read_table(Path(waiting.__file__).with_suffix(".csv"), waiting.Timed)
    lines = list(waiting.compared(rows, RESULTS / "2x-h200" / "calibration.json"))
    assert len(lines) == sum(len(kind.lengths) for kind in waiting.KINDS if kind.gpus == 2)
    bound = [line for line in lines if float(line.split(";")[1].split()[0]) > 1.4]
    off = [float(line.rsplit(" ", 2)[1].rstrip("%")) for line in bound]
    assert len(off) == 9
    assert max(map(abs, off)) < 1.42
    assert sum(map(abs, off)) < 9 * 0.9


class Event:
    """A moment of a device, in ms."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, later: "Event") -> float:
        return later.at_ms - self.at_ms


def test_spans_of_a_step_say_how_far_its_host_is_ahead() -> None:
    """The device begins with its host, and is a millisecond behind it at the layers' end."""
    moments = [("begin", 5.0, 5.0), ("forward", 6.0, 6.0), ("end", 8.0, 9.0)]
    moments += [("backward", 9.0, 12.0), ("end", 10.0, 20.0), ("update", 10.5, 20.5)]
    moments += [("end", 21.5, 22.0)]
    marks = [ahead.Mark(label, 1e3 * host, Event(at)) for label, host, at in moments]
    forward, backward, update = ahead.spans_of(marks)
    assert forward["span"] == "forward"
    assert (forward["device_us"], forward["host_us"]) == pytest.approx((3000.0, 2000.0))
    assert (forward["ahead_us"], forward["left_us"]) == pytest.approx((0.0, 1000.0))
    assert (backward["microbatch"], backward["left_us"]) == (0, pytest.approx(10000.0))
    assert update["device_us"] == pytest.approx(1500.0)


def test_layers_are_told_as_they_ran_where_their_host_is_far_ahead() -> None:
    """On an H200 and an H100, backward passes too short (docs/fidelity.md): within 6 %."""
    rows = read_table(Path(ahead.__file__).with_suffix(".csv"), ahead.Span)
    plan = read_table(RESULTS / "4x-h200" / "forecasts" / "plan-45.csv", TrainingConfig)
    for system, models in (("4x-h200", 7), ("2x-h100", 9)):
        lines = list(ahead.compared(rows, plan, RESULTS / system / "calibration.json"))
        told = [float(one) for line in lines for one in re.findall(r"told (\S+)%", line)]
        assert (len(lines), len(told)) == (models, 2 * models)
        assert max(map(abs, told)) < 6.0


def test_files_without_a_common_case_get_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path(ahead.__file__).with_suffix(".csv")
    rows = own.read_text().splitlines()
    for text, complaint in (
        (rows[:1], "no row is of a case of"),
        ([rows[0], rows[1].replace(",forward,", ",sideways,")], "span is 'sideways'"),
        ([rows[0], *(row for row in rows if ",forward," in row)], ""),
    ):
        (tmp_path / "rows.csv").write_text("\n".join(text) + "\n")
        status = run(ahead.main, [str(tmp_path / "rows.csv")])
        assert status == (2 if complaint else 0)
        assert complaint in capsys.readouterr().err
