"""Low-rank and 8-bit products beside plain ones: models of their own that disturb no other."""

from pathlib import Path

import pytest

from calibrate.fit import fit, systems
from calibrate.kernels.shapes import by_model
from spec.calibration import Calibration
from spec.files import read_table, write_table
from spec.kernel import GEMM_DIRECTIONS, Kernel, parse_kernel
from spec.records import KernelRow
from tests.synthetic import Truth
from tests.test_calibrate_fit import run_folder, write_small

TRUTH = Truth()
FASTER = 1.7  # of 8-bit products over plain ones of the same shape, launch taken out
NARROW_US = 9.0  # added to low-rank products, which physics does not foretell


def row(kernel: Kernel, time_us: float, like: KernelRow) -> KernelRow:
    times = ("median_us", "p10_us", "p90_us", "min_us", "mean_us")
    change = {
        "case_id": f"extra-{kernel.direction}-{kernel.shape}-{kernel.dtype}",
        "shape": kernel.shape,
        "dtype": kernel.dtype,
        "direction": kernel.direction,
        **{name: getattr(like, name) / like.median_us * time_us for name in times},
    }
    return like.model_copy(update=change)


def extra_rows(rows: list[KernelRow]) -> list[KernelRow]:
    plain = [one for one in rows if one.op == "gemm" and one.state == "burst"]
    found = []
    for one in plain[:90]:
        kernel = parse_kernel(one.op, one.direction, one.shape, "fp8")
        time = TRUTH.launch_us + (one.median_us - TRUTH.launch_us) / FASTER
        found.append(row(kernel, time, one))
    shapes = [(m, n, 32) for m in (2048, 4096, 8192) for n in (2048, 4096, 8192, 16384)]
    shapes += [(m, 32, k) for m, k, _ in shapes]
    for way in GEMM_DIRECTIONS:
        for dims in shapes:
            kernel = Kernel("gemm", way, dims)
            time = TRUTH.kernel_us(Kernel("copy", "forward", (int(kernel.bytes) // 4,)))
            found.append(row(kernel, time + NARROW_US, plain[0]))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("products") / "results"
    write_small(results, ("gemm", "attention", "copy", "adam"))
    return results


def fitted(results: Path) -> Calibration:
    return fit(systems(results)[0])


def test_other_products_have_their_own_models(folder: Path) -> None:
    before = fitted(folder)
    path = run_folder(folder) / "kernels.csv"
    rows = read_table(path, KernelRow)
    write_table(path, KernelRow, [*rows, *extra_rows(rows)])
    after = fitted(folder)
    for way in GEMM_DIRECTIONS:
        assert after.kernel_fits["gemm", way, "bf16"] == before.kernel_fits["gemm", way, "bf16"]
    low_rank = Kernel("gemm", "forward", (4096, 6144, 32))  # between measured ones
    own = after.kernel(low_rank)
    assert own.op == "narrow_gemm"
    time, sd = own.time_us(low_rank.dims)
    truth = TRUTH.kernel_us(Kernel("copy", "forward", (int(low_rank.bytes) // 4,))) + NARROW_US
    assert time == pytest.approx(truth, rel=0.15)
    assert sd < 0.2
    # where low-rank products were not measured, plain ones stand in
    assert before.kernel(low_rank).op == "gemm"
    listed = {one.model for one in after.held_out}
    assert {"kernel.gemm.forward", "kernel.gemm.forward.fp8", "kernel.narrow_gemm.wgrad"} <= listed
    assert after.kernel_fits["gemm", "forward", "fp8"].tflops == pytest.approx(
        FASTER * (after.kernel_fits["gemm", "forward", "bf16"].tflops or 0), rel=0.05
    )


def test_a_few_low_rank_products_stay_with_the_plain_ones(folder: Path) -> None:
    path = run_folder(folder) / "kernels.csv"
    rows = [one for one in read_table(path, KernelRow) if not one.case_id.startswith("extra-")]
    few = extra_rows(rows)[-3:]
    write_table(path, KernelRow, [*rows, *few])
    found = by_model(systems(folder)[0])
    assert not any(op == "narrow_gemm" for op, _, _ in found)
    kept = {kernel.dims for kernel in found["gemm", few[0].direction, "bf16"]}
    assert {one.kernel.dims for one in few} <= kept
