"""Each model apart: correction, physics, collectives, networks, clock, against known answers."""

from math import exp, log, sin

import numpy as np
import pytest
from scipy.optimize import least_squares

from calibrate.evidence import Evidence, Judged, Ledger
from calibrate.host.overhead import fit_interference
from calibrate.kernels.correction import conformal_scale, fit_correction, folds
from calibrate.network.between_nodes import (
    PUBLISHED,
    NetworkRow,
    Sample,
    fit_network,
    judge_scaling,
    note_network,
    path_of,
    predict,
    published_samples,
)
from calibrate.network.inside_node import Sweep, largest_from_smaller
from calibrate.network.structure import fit_structure
from calibrate.physics import (
    SOFT,
    Array,
    Physics,
    System,
    fit_physics,
    multiprocessors,
    slopes,
    system_of,
)
from spec.collective_fit import CollectiveCurve, CollectiveFit, CollectivePoint
from spec.files import read_table
from spec.kernel import Kernel
from spec.kernel_fit import KernelFit, features
from spec.network_fit import NetworkFit
from spec.records import InterferenceRow
from tests.clock_rows import product, row

# All-reduce time in us on 2, 3, 4 and 8 A100s of one node by bytes: VIA-Research/vTrain
# (f8dda84), trace/a100/AR_GPU*_1M_1024M_LUT, every seventh size.
A100 = {
    1048576: (44.21, 63.91, 51.4, 92.79),
    59768832: (365.9, 450.3, 473.4, 550.1),
    118489088: (683.5, 825.9, 902.9, 981.6),
    177209344: (985.9, 1207.1, 1313.6, 1509.4),
    235929600: (1296.9, 1572.3, 1696.7, 1986.8),
    294649856: (1589.7, 1955.4, 2106.3, 2360.6),
    353370112: (1899.0, 2329.4, 2519.0, 2847.1),
    412090368: (2208.3, 2688.5, 2912.7, 3301.0),
    470810624: (2495.8, 3078.4, 3287.9, 3681.7),
    529530880: (2794.8, 3423.4, 3678.0, 4136.8),
    588251136: (3088.9, 3786.3, 4058.3, 4570.7),
    646971392: (3372.8, 4154.3, 4467.0, 4992.0),
    705691648: (3678.2, 4499.6, 4850.2, 5446.7),
    764411904: (3952.6, 4886.0, 5224.7, 5884.1),
    823132160: (4257.7, 5215.8, 5650.9, 6382.5),
    881852416: (4528.0, 5569.7, 6010.8, 6806.3),
    940572672: (4820.9, 5935.9, 6377.3, 7223.7),
    999292928: (5090.9, 6283.0, 6763.6, 7645.7),
    1058013184: (5384.7, 6664.9, 7171.2, 8089.5),
}


def a100_curves() -> list[CollectiveCurve]:
    return [
        CollectiveCurve(
            ranks=ranks,
            points=tuple(
                CollectivePoint(bytes=nbytes, time_us=times[column], sd=0.01)
                for nbytes, times in A100.items()
            ),
        )
        for column, ranks in enumerate((2, 3, 4, 8))
    ]


def errors(judged: list[Judged]) -> tuple[float, float]:
    ours = [abs(one.predicted / one.measured - 1) for one in judged]
    dumb = [abs(one.baseline / one.measured - 1) for one in judged]
    return float(np.median(ours)), float(np.median(dumb))


def test_larger_group_follows_from_smaller_ones() -> None:
    ours, dumb = errors(
        largest_from_smaller(Sweep("all_reduce", tuple(a100_curves()), nccl=True, rows=0))
    )
    assert ours < 0.025
    assert ours < 0.5 * dumb


def test_measured_sizes_and_groups_are_given_back() -> None:
    curves = a100_curves()
    structure, _ = fit_structure("all_reduce", curves)
    fit = CollectiveFit(
        collective="all_reduce", curves=tuple(curves), structure_sd=0.1, structure=structure
    )
    for curve in curves:
        for point in curve.points:
            time, sd = fit.time_us(curve.ranks, point.bytes)
            assert time == pytest.approx(point.time_us, rel=1e-3)
            assert sd == point.sd
    assert fit.time_us(16, 1e8)[1] > fit.time_us(8, 1e8)[1]


def test_structure_of_one_group_grows_with_ranks_and_bytes() -> None:
    structure, _ = fit_structure("all_gather", a100_curves()[:1])
    times = [structure.time_us("all_gather", ranks, 2**20) for ranks in (2, 4, 8, 16)]
    assert times == sorted(times)
    assert structure.time_us("all_gather", 4, 2**28) > structure.time_us("all_gather", 4, 2**27)


@pytest.mark.parametrize("protocol", ["infiniband", "ethernet"])
def test_published_networks_scale(protocol: str) -> None:
    ledger = Ledger()
    judge_scaling(ledger, protocol, published_samples(protocol))
    assert len(ledger.held_out) == 2
    for one in ledger.held_out:
        assert one.median_error < 0.2
        assert one.median_error < one.baseline_median_error
        assert one.inside_90 > 0.8


def test_published_rows_are_cited_and_healthy() -> None:
    rows = read_table(PUBLISHED, NetworkRow)
    assert all(row.source.startswith("github.com/") and row.locator for row in rows)
    assert not any("DEGRADED" in row.model_dump_json() for row in rows)
    assert {row.nodes for row in rows} == {2, 4, 8}


def test_network_parameters_come_back() -> None:
    truth = NetworkFit(
        protocol="infiniband",
        launch_us=12.0,
        latency_us=7.0,
        latency_sd=0.1,
        local_step_us=3.0,
        pipelining=0.8,
        efficiency=0.9,
        efficiency_sd=0.1,
        all_to_all_efficiency=0.8,
        scale_sd=0.05,
        max_nodes=8,
        source="assumed",
        detail="made up",
    )
    samples = [
        Sample(kind, path, 2.0**power, truth.time_us(kind, path, 2.0**power, 400.0), 400.0)
        for kind in ("all_reduce", "all_gather", "all_to_all", "send_recv")
        for path in (path_of(8 * nodes, nodes, 50.0) for nodes in (2, 4, 8))
        for power in range(12, 34, 2)
    ]
    fit, _ = fit_network("infiniband", samples, "measured", "made up")
    for name in ("efficiency", "all_to_all_efficiency", "latency_us", "local_step_us"):
        assert getattr(fit, name) == pytest.approx(getattr(truth, name), rel=0.1), name
    assert max(abs(log(predict(fit, one) / one.time_us)) for one in samples) < 0.1


def test_two_nodes_send_each_byte_once_and_more_nodes_as_a_ring() -> None:
    fit, _ = fit_network("infiniband", [], "assumed", "prior")
    fast = 1e6  # scale-up that never binds
    two = fit.time_us("all_reduce", path_of(16, 2, 50.0), 1e12, fast)
    four = fit.time_us("all_reduce", path_of(32, 4, 50.0), 1e12, fast)
    wire = 1e12 / (fit.efficiency * 400e3)
    assert two == pytest.approx(wire, rel=0.02)
    assert four == pytest.approx(wire * 2 * 31 / 32, rel=0.02)


def test_what_no_row_tells_of_a_network_is_assumed() -> None:
    """The published sweeps of InfiniBand have no all-to-all, those of Ethernet have."""
    for protocol, told in (("infiniband", False), ("ethernet", True)):
        samples = published_samples(protocol)
        assert any(one.collective == "all_to_all" for one in samples) == told
        ledger = Ledger()
        note_network(ledger, *fit_network(protocol, samples, "published", "sweeps"))
        source = {one.name.split(".")[-1]: one.source for one in ledger.parameters}
        assert source["all_to_all_efficiency"] == ("published" if told else "assumed")
        assert source["efficiency"] == "published"


def test_physics_of_few_points_leans_on_the_system() -> None:
    large = [Kernel("grad_norm", "forward", (2**power,)) for power in (28, 30)]
    timings = [(one, 4.0 + one.bytes / 3e6) for one in large]
    system = system_of([timings, [(Kernel("copy", "forward", (1024,)), 4.0)]])
    physics, sds = fit_physics(timings, system)
    assert physics.gbytes_per_s == pytest.approx(3000, rel=0.01)
    assert physics.launch_us == pytest.approx(4.0, rel=0.2)
    assert sds["launch_us"] > 10 * sds["gbytes_per_s"]


def test_a_shape_on_the_ridge_leaves_sds_that_rounding_does_not_decide() -> None:
    """Faster than both ceilings, it holds the optimum where they meet: slopes differ by side."""
    known = Physics(3.0, 3000.0, 800.0)

    def from_ridge(kernel: Kernel) -> float:
        return abs(log(kernel.flops / 800e6) - log(kernel.bytes / 3000e3))

    rows = [(256, 256, 8192), (64, 8192, 8192), (64, 128, 128), (128, 128, 128)]
    rows += [(8192, 8192, 8192), (4096, 8192, 8192)]
    kernels = [Kernel("gemm", "forward", dims) for dims in rows]
    squares = [Kernel("gemm", "forward", (m, 2048, 2048)) for m in range(64, 4096)]
    kernels.append(min(squares, key=from_ridge))
    found = []
    for seed in range(6):
        rounding = np.exp(1e-6 * np.random.default_rng(seed).normal(size=len(kernels)))
        times = [known.time_us(one) * by for one, by in zip(kernels, rounding, strict=True)]
        times[-1] *= 0.9
        timings = list(zip(kernels, times, strict=True))
        found.append(list(fit_physics(timings, System(3.0, 3000.0))[1].values()))
    assert np.ptp(np.log(found), axis=0).max() < 1e-3


def test_slopes_are_weighted_as_the_fit_weights_them() -> None:
    sizes, noise = np.logspace(0, 4, 40), np.random.default_rng(0).normal(0, 0.3, 40)

    def residuals(x: Array) -> Array:
        return np.asarray(np.log(np.exp(x[0]) + sizes / np.exp(x[1])) - np.log(3 + sizes) - noise)

    found = least_squares(residuals, np.zeros(2), loss="soft_l1", f_scale=SOFT)
    np.testing.assert_allclose(slopes(residuals, found.x), found.jac.T, atol=1e-4)


def test_physics_is_robust_to_an_outlier() -> None:
    kernels = [Kernel("copy", "forward", (2**power,)) for power in range(14, 31)]
    timings = [(one, 3.0 + one.bytes / 3.2e6) for one in kernels]
    timings[5] = (timings[5][0], timings[5][1] * 10)
    physics, _ = fit_physics(timings, system_of([timings]))
    assert physics.gbytes_per_s == pytest.approx(3200, rel=0.05)


def test_no_wave_quantisation_is_seen_where_there_is_none() -> None:
    kernels = [
        Kernel("gemm", "forward", (m, n, 4096)) for m in (512, 1500, 4096) for n in (1000, 5000)
    ]
    timings = [(one, 3.0 + one.flops / 600e6) for one in kernels]
    assert multiprocessors([timings], system_of([timings])) == 1


def points(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.uniform(5, 10, (count, 2))
    y = 0.1 * np.sin(x.sum(axis=1)) + rng.normal(0, 0.01, count)
    return x, y


def test_correction_helps_near_the_data_and_fades_away() -> None:
    x, y = points(60)
    correction = fit_correction(x, y)
    mean, sd = correction.predict(x, y, np.array([[7.5, 7.5], [40.0, 40.0]]))
    assert mean[0] == pytest.approx(0.1 * sin(15), abs=0.03)
    assert mean[1] == pytest.approx(0, abs=1e-6)
    assert sd[1] > 3 * sd[0]
    assert sd[1] == pytest.approx(np.hypot(correction.amplitude, correction.noise), rel=1e-3)


def test_correction_and_calibration_evaluate_the_same_formula() -> None:
    rng = np.random.default_rng(2)
    shapes = [tuple(int(one) for one in row) for row in rng.integers(64, 8192, (20, 2))]
    physics = Physics(3.0, 3000.0, None)
    kernels = [Kernel("rmsnorm", "forward", dims) for dims in shapes]
    times = [physics.time_us(one) * exp(0.1 * sin(log(one.dims[0]))) for one in kernels]
    x = features("rmsnorm", shapes)
    y = np.array([log(t / physics.time_us(one)) for t, one in zip(times, kernels, strict=True)])
    correction = fit_correction(x, y)
    fit = KernelFit.model_validate(
        {
            "op": "rmsnorm",
            "direction": "forward",
            "dtype": "bf16",
            "launch_us": 3.0,
            "gbytes_per_s": 3000.0,
            "clock_exponent": 0.0,
            "length_scales": correction.length_scales,
            "amplitude": correction.amplitude,
            "noise": correction.noise,
            "points": [
                {"dims": dims, "time_us": time, "sd": 0.01}
                for dims, time in zip(shapes, times, strict=True)
            ],
            "host_us": 1.0,
        }
    )
    at = (1000, 3000)
    mean, sd = correction.predict(x, y, features("rmsnorm", [at]), 0.01)
    time, spread = fit.model_us(at)
    assert time == pytest.approx(fit.physics_us(at) * exp(mean[0]))
    assert spread == pytest.approx(sd[0])


def test_few_points_take_wide_defaults() -> None:
    correction = fit_correction(np.array([[7.0, 8.0], [8.0, 8.0]]), np.array([0.01, -0.01]))
    assert correction.amplitude >= 0.25
    assert correction.length_scales[1] > correction.length_scales[0]


def test_conformal_scale_covers() -> None:
    rng = np.random.default_rng(3)
    assert conformal_scale(list(np.abs(rng.normal(0, 2, 2000)))) == pytest.approx(2, rel=0.1)
    assert conformal_scale([1.0]) > 1
    assert conformal_scale([1.6449] * 8) > 1


def test_families_stay_together_in_folds() -> None:
    families = [(index % 7,) for index in range(50)]
    split = folds(families, 5)
    assert sorted(index for part in split for index in part) == list(range(50))
    for family in set(families):
        assert sum(any(families[index] == family for index in part) for part in split) == 1


def test_interference_is_read_where_a_collective_covers_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def beside(collective_us: float, kernel_us: float, with_us: float) -> InterferenceRow:
        kernel = product(8192)
        known = row(kernel, kernel_us, 1980.0).model_dump()
        fields = {"op", "direction", "dtype", "shape", *InterferenceRow.model_fields} & set(known)
        more = {
            "collective": "all_gather",
            "ranks": 4,
            "bytes": 2**28,
            "kernel_alone_us": 200.0,
            "collective_alone_us": collective_us,
            "collective_with_us": with_us,
        }
        return InterferenceRow.model_validate({key: known[key] for key in fields} | more)

    rows = [beside(700.0, 280.0, 910.0), beside(60.0, 210.0, 200.0)]
    evidence = Evidence("made-up", [])
    monkeypatch.setattr(Evidence, "rows", lambda *_: [("run", one) for one in rows])
    found = fit_interference(evidence, Ledger())
    assert found.kernel == pytest.approx(0.4)
    assert found.collective == pytest.approx(0.3)
