"""What a product waits behind a collective: whole waves of tiles."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.evidence import Evidence, Ledger
from calibrate.kernels.behind import ASSUMED, LEAST, fit_behind
from measure.plans.grid import behind as grid
from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws
from simulate.hardware.transfer import transfer
from spec.behind_fit import BehindFit, waves
from spec.calibration import Calibration, read_calibration
from spec.fitted import changed
from spec.kernel import Kernel
from spec.parallelism import Parallelism
from spec.records import BehindRow
from spec.step import layer
from tests.made_up import calibration_json
from tests.simulated_steps import FABRIC, MODEL, NODE, simulate
from topologies import load_node

ROOT = Path(__file__).parent.parent
HOPPER = BehindFit(held=18, multiprocessors=132, sd=0.1)


def queued_us(kernel: Kernel, product_us: float, sent_us: float, count: int, held: int) -> float:
    """A product's end where tiles go to whichever multiprocessor is free: list scheduling.

    Some of them are free only once a collective is through. Tiles are such that all waves are full.
    """
    number = waves(kernel, count)
    ends = np.array([0.0] * (count - held) + [sent_us] * held)
    worked = np.zeros(count, dtype=bool)
    for _ in range(number * count):
        at = int(ends.argmin())
        ends[at] += product_us / number
        worked[at] = True
    return float(ends[worked].max())


def row(
    kernel: Kernel, kind: str, nbytes: int, alone_us: float, sent_us: float, us: float, role: str
) -> Any:
    times = dict.fromkeys(("median_us", "p10_us", "p90_us", "min_us", "mean_us"), us)
    return BehindRow.model_validate(
        times
        | {
            "case_id": f"{kernel.shape} {kind}",
            "role": role,
            "repeats": 12,
            "std_us": 0.0,
            "op": kernel.op,
            "direction": kernel.direction,
            "dtype": kernel.dtype,
            "shape": kernel.shape,
            "collective": kind,
            "ranks": 2,
            "bytes": nbytes,
            "kernel_alone_us": alone_us,
            "collective_alone_us": sent_us,
            "both_us": us,
        }
    )


def scheduled(count: int, held: int) -> list[BehindRow]:
    """The suite on a GPU of so many multiprocessors, 5.5 TFLOP/s each, 300 GB/s of links."""
    found = []
    for kernel, kinds, nbytes in grid(2):
        alone_us = kernel.flops / (5.5e6 * count) + 3
        for kind in kinds:
            sent_us = 15 + nbytes * (2 if kind == "all_reduce" else 1) / 2 / 3e5
            us = queued_us(kernel, alone_us, sent_us, count, held)
            role = "fit" if len(found) % 4 else "judge"
            found.append(row(kernel, kind, nbytes, alone_us, sent_us, us, role))
    return found


def fitted(rows: list[BehindRow], monkeypatch: pytest.MonkeyPatch, kind: str = "nvidia") -> Any:
    monkeypatch.setattr(
        Evidence,
        "rows",
        lambda _, table, role="fit": [("run", one) for one in rows if one.role == role],
    )
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    device = SimpleNamespace(kind=kind)
    monkeypatch.setattr(Evidence, "devices", lambda *_: [device])
    ledger = Ledger()
    return fit_behind(Evidence("made-up", []), ledger), ledger


@pytest.mark.parametrize(("count", "held"), [(132, 20), (108, 16), (148, 32)])
def test_tiles_in_a_queue_tell_the_multiprocessors(
    count: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows by list scheduling, which the fit knows nothing of."""
    found, ledger = fitted(scheduled(count, held), monkeypatch)
    assert found.multiprocessors == count
    assert {one.source for one in ledger.parameters} == {"measured"}
    of_held = next(one for one in ledger.parameters if one.name == "behind.held")
    assert of_held.low <= held <= of_held.high
    (judged,) = ledger.held_out
    assert judged.median_error < 0.02
    assert judged.median_error < 0.5 * judged.baseline_median_error


def test_without_rows_it_is_assumed_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    few = scheduled(132, 20)[: LEAST - 1]
    found, ledger = fitted(few, monkeypatch)
    assert found == ASSUMED
    assert [one.source for one in ledger.parameters] == ["assumed"]
    none, ledger = fitted(scheduled(132, 20), monkeypatch, "cpu")
    assert none is None
    assert not ledger.parameters


def test_two_h200_and_two_h100_hold_some_of_132() -> None:
    """The committed calibrations; NCCL has 16 to 32 channels there."""
    for system in ("2x-h200", "4x-h200", "2x-h100"):
        fit = read_calibration(ROOT / "results" / system / "calibration.json").behind
        assert fit is not None
        assert fit.multiprocessors == 132
        assert 12 <= fit.held <= 32


@pytest.mark.parametrize(
    ("dims", "direction", "alone_us", "sent_us", "waited_us"),
    [  # rows of results/2x-h200/20261125-013648/behind.csv
        ((8192, 6144, 4096), "wgrad", 519, 168, 80),  # a wave of six, whatever is sent
        ((8192, 6144, 4096), "wgrad", 518, 252, 82),
        ((8192, 8192, 2048), "wgrad", 348, 141, 80),  # of four
        ((8192, 6144, 4096), "dgrad", 522, 161, 65),  # of eight
        ((8192, 3072, 2048), "wgrad", 139, 96, 95),  # one wave: all that is sent
        ((2048, 16384, 4096), "dgrad", 343, 57, 68),
    ],
)
def test_measured_waits(
    dims: tuple[int, ...], direction: str, alone_us: float, sent_us: float, waited_us: float
) -> None:
    kernel = Kernel("gemm", direction, dims)
    told = HOPPER.waits_us(kernel, float(alone_us), float(sent_us))
    assert told == pytest.approx(waited_us, abs=0.035 * alone_us)


sizes = st.integers(1, 300).map(lambda one: 128 * one)
spans = st.floats(1.0, 1e5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes, sizes, sizes, spans, spans, st.floats(1.0, 3.0))
def test_waits_grow_with_both_and_never_exceed_the_collective(
    m: int, n: int, k: int, product_us: float, sent_us: float, more: float
) -> None:
    kernel = Kernel("gemm", "wgrad", (m, n, k))
    wait = HOPPER.waits_us(kernel, product_us, sent_us)
    assert 0 <= wait <= sent_us
    assert HOPPER.waits_us(kernel, product_us, more * sent_us) >= wait
    assert HOPPER.waits_us(kernel, more * product_us, sent_us) >= wait
    several = HOPPER.waits_us(kernel, np.full(2, product_us), np.array([sent_us, more * sent_us]))
    assert several[0] == pytest.approx(wait)
    assert waves(kernel, 132) >= 1


def with_fit(**changes: Any) -> Calibration:
    fit = HOPPER.model_copy(update=changes).model_dump()
    return Calibration.model_validate(calibration_json(behind=fit))


def test_a_layer_waits_before_its_products_and_nothing_is_lost() -> None:
    """Two pairs of a collective and a product: each product longer, what is left exposed."""
    p = Parallelism(tp=4, sequence_parallel=True, microbatch=8, global_batch=8)
    costs = Costs(with_fit(sd=0.0), NODE, FABRIC, p, Draws(0))
    fc1 = next(part for part in layer(MODEL, p)[1] if part.name == "fc1")
    own, left = 0.0, 0.0
    products = [one for one in fc1.kernels if one.op == "gemm"]
    for product, sent in zip(products, fc1.hidden, strict=True):
        alone_us, sent_us = costs.kernel_us(product), costs.collective_us(sent)
        lasts = alone_us + HOPPER.waits_us(product, float(alone_us), float(sent_us))
        own, left = own + lasts, left + max(costs.slowed("tp") * sent_us - lasts, 0.0)
    rest = sum(costs.kernel_us(one) for one in fc1.kernels if one.op != "gemm")
    cost = costs.part(fc1)
    assert cost.kernels == pytest.approx(own + rest)
    assert max(sum(cost.hidden) - cost.kernels, 0.0) == pytest.approx(left)
    assert own > sum(costs.kernel_us(one) for one in products)


def test_what_is_left_behind_a_product_is_slowed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it 3 ms of a collective advance by what they are slowed there, 1.4 times."""
    p = Parallelism(tp=4, sequence_parallel=True, microbatch=8, global_batch=8)
    costs = Costs(changed(with_fit(sd=0.0), communication_slowed=0.4), NODE, FABRIC, p, Draws(0))
    monkeypatch.setattr(Costs, "collective_us", lambda *_: np.array([3000.0]))
    fc1 = next(part for part in layer(MODEL, p)[1] if part.name == "fc1")
    left = 0.0
    for product in (one for one in fc1.kernels if one.op == "gemm"):
        alone_us = float(costs.kernel_us(product))
        left += 3000 - (alone_us + HOPPER.waits_us(product, alone_us, 3000.0)) / 1.4
    cost = costs.part(fc1)
    assert sum(cost.hidden) - cost.kernels == pytest.approx(left)
    assert 0 < left < 6000


def test_software_that_waits_has_no_product_beside_its_communication() -> None:
    p = Parallelism(tp=4, sequence_parallel=True, microbatch=8, global_batch=8)
    costs = Costs(with_fit(sd=0.0), NODE, FABRIC, p, Draws(0), tp_waits=True)
    fc1 = next(part for part in layer(MODEL, p)[1] if part.name == "fc1")
    cost = costs.part(fc1)
    assert cost.hidden == []
    assert cost.kernels == pytest.approx(sum(costs.kernel_us(one) for one in fc1.kernels))


def test_another_gpu_has_its_own_multiprocessors() -> None:
    moved = transfer(with_fit(), load_node("hgx-h200"), load_node("dgx-a100")).behind
    assert moved is not None
    assert (moved.held, moved.multiprocessors) == (HOPPER.held, 108)


def test_it_lengthens_tensor_parallel_steps_alone() -> None:
    def longer(p: Parallelism) -> float:
        times = [
            simulate(p, one, clock_mhz=1500.0).step_time_s[0]
            for one in (with_fit(sd=0.0, held=1e-9), with_fit(sd=0.0, held=60.0))
        ]
        return float(times[1] / times[0] - 1)

    assert longer(Parallelism(tp=4, microbatch=8, global_batch=16)) > 1e-4
    assert longer(Parallelism(dp=4, global_batch=16)) == 0
    assert longer(Parallelism(pp=4, global_batch=16)) == 0


def test_a_calibration_with_nonsense_is_refused() -> None:
    text = json.dumps(calibration_json(behind=HOPPER.model_dump()))
    for field, value in (("held", -1), ("held", 132), ("multiprocessors", 0), ("sd", 99)):
        broken = json.loads(text)
        broken["behind"][field] = value
        with pytest.raises(ValueError, match=field):
            Calibration.model_validate(broken)
